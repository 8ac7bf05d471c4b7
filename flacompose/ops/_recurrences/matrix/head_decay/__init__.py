"""Head decay: ``S_t = exp(g_t) S_{t-1} + k_t v_t^T``, one gate per token and head."""
