"""Mamba-2's scan: scalar decay with its time steps, skip and gate."""
