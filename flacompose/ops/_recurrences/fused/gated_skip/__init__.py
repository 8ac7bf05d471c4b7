"""What surrounds a scan: a direct path from input to output, and a gate, ``o = (y + (D + w) x) * silu(z)``."""
