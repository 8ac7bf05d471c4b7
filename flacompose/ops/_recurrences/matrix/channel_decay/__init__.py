"""Channel decay: ``S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t v_t^T``, read after or before the decay."""
