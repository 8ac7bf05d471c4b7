"""ReBased, https://arxiv.org/abs/2402.10644."""

from __future__ import annotations

import torch

from flacompose.layers.feature_map import QuadraticFeatureMap
from flacompose.layers.recurrent import factory_of
from flacompose.layers.weighted_mean import WeightedMeanLayer


class ReBasedLinearAttention(WeightedMeanLayer):
    r"""A layer of linear attention with learned squares for weights, of $x$, per head:

    $$q = \gamma \odot \operatorname{layernorm}(x W_q) + \beta \quad
    k = \gamma \odot \operatorname{layernorm}(x W_k) + \beta \quad v = x W_v \quad
    \phi(y)^\top \phi(z) = \frac{(y^\top z)^2}{K}$$
    $$S_t = S_{t-1} + \phi(k_t)\, [v_t, 1]^\top \qquad
    [o_t, n_t] = S_t^\top \phi(q_t) \qquad y = \frac{o}{n + \text{eps}}\, W_o$$

    From "Linear Transformers with Learnable Kernel Functions are Better In-Context Models"
    (<https://arxiv.org/abs/2402.10644>). The ``F = K (K + 1) / 2`` features $\phi(y)$ of a head are the squares and the
    products of its channels, each times a constant. The recurrent state is ``[N, H, F, V + 1]``. Its last column is the
    sum of the features of all keys. Arguments, defaults and parameter names are as in flash-linear-attention 0.6,
    whose checkpoints load; only the default of `mode` differs.

    Args:
        hidden_size: Size of the input and of the output.
        l_max: Accepted for compatibility with flash-linear-attention, and not used.
        feature_dim: Channels ``K`` of a head of queries or keys, before the feature map.
        num_key_value_heads: The same as `num_heads`.
        num_heads: Number of heads ``H``, each of ``V = hidden_size // num_heads`` values.
        use_gamma: Whether $\gamma$ is a parameter, shared by the queries and keys of all heads. Otherwise it is 1.
        use_beta: Whether $\beta$ is a parameter, shared likewise. Otherwise it is 0.
        normalize: Whether queries and keys are normed.
        causal: True: a token sees no later one.
        eps: Added to the sum of the weights, above 0. All weights may be near 0. In float32 the error of their sum is
            up to about 1e-7 times the squares of the norms of query and key, so `eps` should not be much smaller.
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
            "parallel" and "fused_chunk" are refused, since "chunk" computes the same function.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default.

    Raises:
        ValueError: If an argument has a wrong value, or there are more heads than channels.
        TypeError: If an argument has the wrong type.
    """

    def __init__(
        self,
        hidden_size: int,
        l_max: int = 2048,
        feature_dim: int = 16,
        num_key_value_heads: int = 16,
        num_heads: int = 16,
        use_gamma: bool = True,
        use_beta: bool = True,
        normalize: bool = True,
        causal: bool = True,
        eps: float = 1e-5,
        mode: str = "chunk",
        layer_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, 0, layer_idx)
        self._check_mean(feature_dim, causal, eps)
        self._keep_flags(use_gamma=use_gamma, use_beta=use_beta, normalize=normalize)
        factory = factory_of(device, dtype)
        self.feature_map = QuadraticFeatureMap(feature_dim, use_gamma, use_beta, normalize, **factory)
        features = feature_dim * (feature_dim + 1) // 2
        self._add_heads(num_heads, num_key_value_heads, feature_dim, features, factory)
