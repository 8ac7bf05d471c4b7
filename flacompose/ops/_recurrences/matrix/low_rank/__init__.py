"""Diagonal plus low rank: ``S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t^T S) + k_t v_t^T``."""
