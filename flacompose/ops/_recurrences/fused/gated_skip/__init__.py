"""The gated skip connection from the input of a scan to its output: ``o = (y + (D + w) x) * silu(z)``."""
