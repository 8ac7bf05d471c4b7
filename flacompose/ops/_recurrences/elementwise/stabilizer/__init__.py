"""Running maximum with decay, which stabilises exponential gates: ``m_t = max(g_t + m_{t-1}, x_t)``."""
