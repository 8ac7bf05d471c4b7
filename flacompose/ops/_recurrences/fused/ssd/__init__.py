"""Mamba-2's scan of scalar decay with all that surrounds it: time steps, a skip and a gate."""
