"""Based, https://arxiv.org/abs/2402.18668, section 4.1: its linear attention."""

from __future__ import annotations

import torch

from flacompose.layers import _check
from flacompose.layers.feature_map import TaylorFeatureMap
from flacompose.layers.recurrent import factory_of
from flacompose.layers.weighted_mean import WeightedMeanLayer


class BasedLinearAttention(WeightedMeanLayer):
    r"""A layer of linear attention with the Taylor series of the exponential for weights, of $x$, per head:

    $$q = x W_q \quad k = x W_k \quad v = x W_v \quad
    \phi(y)^\top \phi(z) = 1 + \frac{y^\top z}{\sqrt{K}} + \frac{(y^\top z)^2}{2 K}$$
    $$S_t = S_{t-1} + \phi(k_t)\, [v_t, 1]^\top \qquad
    [o_t, n_t] = S_t^\top \phi(q_t) \qquad y = \frac{o}{n + \text{eps}}\, W_o$$

    From "Simple linear attention language models balance the recall-throughput tradeoff"
    (<https://arxiv.org/abs/2402.18668>). The ``F = (K + 1) (K + 2) / 2`` features $\phi(y)$ of a head are 1, the ``K``
    channels, their squares and their products, each times a constant. The recurrent state is ``[N, H, F, V + 1]``. Its
    last column is the sum of the features of all keys. Arguments, defaults and parameter names are as in
    flash-linear-attention 0.6, whose checkpoints load; only the default of `mode` differs.

    Args:
        hidden_size: Size of the input and of the output.
        feature_dim: Channels ``K`` of a head of queries or keys, before the feature map.
        num_key_value_heads: The same as `num_heads`.
        num_heads: Number of heads ``H``, each of ``V = hidden_size // num_heads`` values.
        feature_name: "taylor_exp", the only map.
        eps: Added to the sum of the weights, above 0. It hardly matters, since each weight is at least 1/2.
        causal: True: a token sees no later one.
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
            "parallel" and "fused_chunk" are refused, since "chunk" computes the same function.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default.

    Raises:
        ValueError: If an argument has a wrong value, or there are more heads than channels.
        TypeError: If an argument has the wrong type.
    """

    def __init__(
        self,
        hidden_size: int,
        feature_dim: int = 16,
        num_key_value_heads: int = 12,
        num_heads: int = 12,
        feature_name: str = "taylor_exp",
        eps: float = 1e-12,
        causal: bool = True,
        mode: str = "chunk",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, 0, None)
        self._check_mean(feature_dim, causal, eps)
        _check.one_of("feature_name", feature_name, ("taylor_exp",))
        self.feature_map = TaylorFeatureMap()
        features = (feature_dim + 1) * (feature_dim + 2) // 2
        self._add_heads(num_heads, num_key_value_heads, feature_dim, features, factory_of(device, dtype))
