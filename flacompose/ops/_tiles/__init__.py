"""Blocks that kernels are built of, in Triton and, for Hopper, in Gluon."""
