"""Kernel families: each holds one recurrence's reference, its eager form, its Triton kernels and its registered ops."""
