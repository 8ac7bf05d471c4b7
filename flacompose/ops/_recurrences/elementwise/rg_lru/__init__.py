"""RG-LRU: ``h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t``, with decays from gates and rates."""
