"""The gated skip after a scan, from its input to its output: ``o = (y + (D + w) x) * silu(z)``."""
