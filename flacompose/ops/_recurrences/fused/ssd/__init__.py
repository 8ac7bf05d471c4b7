"""Mamba-2's scan: time steps, head decay, skip connection and gate."""
