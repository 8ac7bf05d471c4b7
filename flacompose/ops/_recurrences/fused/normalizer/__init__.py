"""The denominator of mLSTM: ``o_t = x_t / (max(|scale n_t^T q_t|, floor_t) + eps)``."""
