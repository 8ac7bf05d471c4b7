"""Short causal convolution of each channel: ``y_t = b + sum_w weight_w * x_{t-W+1+w}``."""
