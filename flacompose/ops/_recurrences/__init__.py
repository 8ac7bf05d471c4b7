"""The recurrences: each folder has a reference, eager form, Triton kernels and operators."""
