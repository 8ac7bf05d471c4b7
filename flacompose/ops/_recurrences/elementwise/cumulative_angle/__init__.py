"""Mamba-3's cumulative angle: ``o_t = o_{t-1} + tanh(x_t) dt_t``, modulo a whole turn."""
