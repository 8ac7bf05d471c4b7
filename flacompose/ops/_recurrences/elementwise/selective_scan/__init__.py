"""Selective scan: ``h_t = exp(dt_t A) * h_{t-1} + dt_t x_t B_t^T``, a state of S numbers for each channel."""
