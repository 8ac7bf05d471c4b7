"""The running maximum with decay, the stabiliser of exponential gates: ``m_t = max(g_t + m_{t-1}, x_t)``."""
