"""Mamba-2's scan: head decay with its time steps, skip and gate."""
