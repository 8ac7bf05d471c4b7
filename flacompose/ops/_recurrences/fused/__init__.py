"""Operators that fuse many operations of PyTorch into one kernel."""
