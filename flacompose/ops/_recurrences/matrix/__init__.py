"""Recurrences whose state is a matrix, by how it decays and whether tokens erase what it holds."""
