"""Recurrences and their parts that are made of operators, in PyTorch."""
