"""Operators that compute in one kernel what would be many operations of PyTorch."""
