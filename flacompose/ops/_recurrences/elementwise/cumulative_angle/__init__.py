"""Mamba-3's angles, each the sum of all turns so far: ``o_t = o_{t-1} + tanh(x_t) dt_t``, modulo a whole turn."""
