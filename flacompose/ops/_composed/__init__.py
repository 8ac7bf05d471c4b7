"""Recurrences, and parts of them, composed of operators in PyTorch."""
