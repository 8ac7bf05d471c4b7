"""Mamba-2's scan of head decay with all that surrounds it: time steps, a skip and a gate."""
