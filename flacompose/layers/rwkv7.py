"""RWKV7 (Goose), https://arxiv.org/abs/2503.14456, section 4: its time mixing."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose._peer import explained
from flacompose.layers import _check
from flacompose.layers.initialization import copy_, orthogonal_, with_initializers
from flacompose.layers.layout import Layout, distributed_like, rows_of, tokens_of
from flacompose.layers.lora import lora
from flacompose.layers.norm import GroupNorm
from flacompose.layers.recurrent import RecurrentLayer, factory_of
from flacompose.layers.state import RecurrentState, RecurrentStates, StateShapes
from flacompose.layers.token_shift import as_projected, token_shift
from flacompose.ops import chunk_dplr_delta_rule, fused_recurrent_dplr_delta_rule
from flacompose.ops._tensors.dtype import upcast


class RWKV7Attention(RecurrentLayer):
    r"""The time mixing of RWKV7, of $x$ and of $v^{first}$, the values of the first layer of a model, per head:

    $$x^i_t = x_t + (x_{t-1} - x_t) \odot \mu^i \quad (i \in rwkvag) \qquad
    r = x^r W_r \quad k' = x^k W_k \quad v' = x^v W_v$$
    $$w = -e^{-1/2} \operatorname{sigmoid}\bigl(\tanh(x^w W_1) W_2 + b^w\bigr) \qquad
    \eta = \operatorname{sigmoid}(x^a W_3 W_4 + b^a) \qquad g = \operatorname{sigmoid}(x^g W_5) W_6$$
    $$v = v' + (v^{first} - v') \odot \operatorname{sigmoid}(x^v W_7 W_8 + b^v) \qquad
    \kappa = \frac{k' \odot k_k}{\lVert k' \odot k_k \rVert} \qquad k = k' \odot (1 + (\eta - 1) \odot k_a)$$
    $$S_t = \operatorname{diag}(e^{w_t})\, S_{t-1} - (\kappa_t \odot \eta_t) (S_{t-1}^\top \kappa_t)^\top + k_t v_t^\top
    \qquad o_t = S_t^\top r_t$$
    $$y = \Bigl(\bigl(\operatorname{groupnorm}(o) + (\textstyle\sum r \odot k \odot r_k)\, v\bigr) \odot g\Bigr) W_o$$

    In the first layer $v$ is $v'$, which is $v^{first}$ in all other layers. From "RWKV-7 Goose with Expressive Dynamic
    State Evolution" (<https://arxiv.org/abs/2503.14456>). Arguments, defaults, parameter names and initialization are
    as in flash-linear-attention 0.6, whose checkpoints load. In the state dict the $W_1$ to $W_8$ and their biases
    are ``w_lora``, ``a_lora``, ``g_lora`` and ``v_lora``, and the $\mu$ are ``x_r``, ``x_w`` and so on.

    The initialization depends on the index of the layer. Without `layer_idx` or `num_hidden_layers` the layer is
    initialized like the only layer of a model. There flash-linear-attention raises an error, or uses other values, such
    as zeros for $k_k$, whose norm has no gradient. If `value_dim` is not `hidden_size`, where flash-linear-attention
    raises an error too, the initial values of all channels follow the same formulas.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        hidden_size: Size of the input and of the output, and of the keys of all heads together.
        head_dim: Keys of each head, ``K``. None for ``hidden_size // num_heads``.
        num_heads: Number of heads ``H``. Default: ``hidden_size // head_dim``, the only value allowed where `head_dim`
            is given.
        decay_low_rank_dim: Rank of the projection to ``w``. Default: about ``2.5 * hidden_size ** 0.5 * K / 64``, a
            multiple of 32.
        gate_low_rank_dim: Rank of the projection to ``g``. Default: about ``5 * hidden_size ** 0.5``, a multiple of 32.
        a_low_rank_dim: Rank of the projection to $\eta$. Default: the default of `decay_low_rank_dim`.
        v_low_rank_dim: Rank of the projection to the share of $v^{first}$. Default: about
            ``1.7 * hidden_size ** 0.5 * K / 64``, a multiple of 32. Not used if `layer_idx` is 0.
        elementwise_affine: Whether the norm has a weight and a bias; None stands for False.
        norm_eps: ``norm_eps * K`` is added to the variance in the norm.
        layer_idx: Index of the layer in the model. Layer 0 makes $v^{first}$, and all other layers take it.
        fuse_norm: Whether the norm of $\kappa$ is the root of its sum of squares plus 1e-6. Otherwise the norm is at
            least 1e-12.
        value_dim: Size of the values of all heads. Default: `hidden_size`.
        num_hidden_layers: Number of layers of the model, used for the initialization alone.
        allow_neg_eigval: Whether $\eta$ is multiplied by $1 + e^w$ in the erasure, so that a token may reverse the
            state along $\kappa$. The eigenvalues of a token's transition are then between -1 and 1, otherwise between
            -0.46 and 1. Counting modulo 2 and following permutations need an eigenvalue of -1
            (<https://arxiv.org/abs/2411.12537>). flash-linear-attention has no such argument.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default.

    Raises:
        ValueError: If an argument has a wrong value, neither `head_dim` nor `num_heads` is given or they contradict
            each other, the heads do not divide the sizes, or a head has over 512 keys.
        TypeError: If an argument has the wrong type.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        head_dim: int | None = 64,
        num_heads: int | None = None,
        decay_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        fuse_norm: bool = False,
        value_dim: int | None = None,
        num_hidden_layers: int | None = None,
        allow_neg_eigval: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx)
        self._keep_flags(fuse_norm=fuse_norm, allow_neg_eigval=allow_neg_eigval)
        affine = _check.optional_flag("elementwise_affine", elementwise_affine)
        H, K, V = _heads(hidden_size, head_dim, num_heads, value_dim)
        D, HV, size = hidden_size, H * V, hidden_size**0.5
        self.num_heads, self.head_dim, self.head_v_dim = H, K, V
        self.key_dim, self.value_dim = D, HV
        self.decay_low_rank_dim = _rank("decay_low_rank_dim", decay_low_rank_dim, 2.5 * size * (K / 64))
        self.gate_low_rank_dim = _rank("gate_low_rank_dim", gate_low_rank_dim, 5 * size)
        self.a_low_rank_dim = _rank("a_low_rank_dim", a_low_rank_dim, 2.5 * size * (K / 64))
        self.v_low_rank_dim = _rank("v_low_rank_dim", v_low_rank_dim, 1.7 * size * (K / 64))
        self.num_hidden_layers = num_hidden_layers
        index, layers = place_of(layer_idx, num_hidden_layers)

        factory = factory_of(device, dtype)
        self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g = (
            nn.Parameter(torch.empty(1, 1, D, **factory)) for _ in "rwkvag"
        )
        self.k_k = nn.Parameter(torch.empty(D, **factory))
        self.k_a = nn.Parameter(torch.empty(D, **factory))
        self.r_k = nn.Parameter(torch.empty(H, K, **factory))
        self.r_proj, self.k_proj, self.v_proj = (
            with_initializers(
                nn.Linear(D, outputs, bias=False, **factory), weight=partial(orthogonal_, gain=gain)
            )
            for outputs, gain in ((D, 1.0), (D, 0.1), (HV, 1.0))
        )
        self.o_proj = with_initializers(nn.Linear(HV, D, bias=False, **factory), weight=nn.init.zeros_)
        decays = partial(_first_decays_, head_dim=K, depth=index / max(layers - 1, 1))
        rates = partial(_first_rates_, head_dim=K)
        self.w_lora = lora(D, self.decay_low_rank_dim, D, nn.Tanh(), factory, decays)
        if layer_idx != 0:
            self.v_lora = lora(D, self.v_low_rank_dim, HV, nn.Identity(), factory, _first_shares_)
        self.a_lora = lora(D, self.a_low_rank_dim, D, nn.Identity(), factory, rates)
        self.g_lora = lora(D, self.gate_low_rank_dim, HV, nn.Sigmoid(), factory, bias=None)
        self.g_norm = with_initializers(
            GroupNorm(H, HV, K * norm_eps, affine, **factory),
            weight=partial(nn.init.constant_, val=((index + 1) / layers) ** 0.7),
            bias=nn.init.zeros_,
        )
        self.state_shapes = StateShapes(((H, K, V),), shift=(D,))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself."""
        index, layers = place_of(self.layer_idx, self.num_hidden_layers)
        for mu, power in (
            (self.x_r, 0.2), (self.x_w, 0.9), (self.x_k, 0.7), (self.x_v, 0.7), (self.x_a, 0.9), (self.x_g, 0.2)
        ):  # fmt: skip
            first_mix_(mu, power * (1 - index / layers))
        copy_(self.k_k, 0.71 - 0.1 * _evenly_spaced(self.k_k))
        nn.init.constant_(self.k_a, 1.02)
        nn.init.constant_(self.r_k, -0.04)

    if TYPE_CHECKING:  # nn.Module says nothing of the types of a call

        @overload  # type: ignore[override]
        def __call__(
            self,
            hidden_states: Tensor,
            state: RecurrentState | None = None,
            *,
            v_first: Tensor | None = None,
            attention_mask: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            num_states: None = None,
        ) -> tuple[Tensor, RecurrentState, Tensor]: ...

        @overload
        def __call__(
            self,
            hidden_states: Tensor,
            state: RecurrentState | None = None,
            *,
            v_first: Tensor | None = None,
            attention_mask: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            num_states: int,
        ) -> tuple[Tensor, RecurrentStates, Tensor]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @explained
    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        state: RecurrentState | None = None,
        *,
        v_first: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_states: int | None = None,
    ) -> tuple[Tensor, RecurrentState | RecurrentStates, Tensor]:
        r"""Go through ``T`` tokens from `state`.

        Other arguments, results and errors are as in
        [GatedLinearAttention][flacompose.layers.GatedLinearAttention.forward].

        Args:
            v_first: $v^{first}$ of the same ``T`` tokens, ``[B, T, value_dim]``, in any float dtype, as layer 0 has
                returned it in the same call of the model. Not used if `layer_idx` is 0; required by all other layers.

        Returns:
            ``(output, state, v_first)``: in layer 0 `v_first` holds the layer's own values, and zeros in places without
                a token; in all other layers it is the argument.
        """
        y, new, *own = self._call(hidden_states, state, attention_mask, cu_seqlens, num_states, v_first)
        first: Any = own[0] if own else v_first
        return y, new, first

    def _compute(
        self, x: Tensor, past: RecurrentState, tokens: Layout, v_first: Tensor | None
    ) -> tuple[Tensor, RecurrentState] | tuple[Tensor, RecurrentState, Tensor]:
        shared = None if self.is_first else rows_of(tokens.enter(self._checked(x, v_first)))
        x = as_projected(x)
        before, shift = token_shift(x, past.shift, tokens.lengths, tokens.cu_seqlens, tokens.num_states)
        rows, delta = rows_of(x), rows_of(before - x)
        mixed = (self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g)
        x_r, x_w, x_k, x_v, x_a, x_g = ((rows + delta * mu.flatten()).to(x.dtype) for mu in mixed)
        r, k, v_own = self.r_proj(x_r), self.k_proj(x_k), self.v_proj(x_v)
        w = -math.exp(-0.5) * upcast(self.w_lora(x_w)).sigmoid()
        eta = upcast(self.a_lora(x_a)).sigmoid()
        gate = self.g_lora(x_g)
        v = v_own if shared is None else self._mixed_values(v_own, shared, x_v)
        kappa = upcast(k) * self.k_k
        k = (k * (1 + (eta - 1) * self.k_a)).to(r.dtype)
        if self.allow_neg_eigval:
            eta = eta * (1 + w.exp())
        r, w, k, v, kappa, eta, gate = (
            y.unflatten(-1, (self.num_heads, -1)) for y in (r, w, k, v, kappa, eta, gate)
        )
        kappa = self._divided_by_its_norm(kappa)
        a, b = (-kappa).to(r.dtype), (kappa * eta).to(r.dtype)

        dplr = self._wide_op(
            chunk_dplr_delta_rule, fused_recurrent_dplr_delta_rule, x, past.recurrent, tokens
        )
        o, recurrent = dplr(
            tokens_of(r, x),
            tokens.masked(tokens_of(k, x)),
            tokens_of(v, x),
            tokens_of(a, x),
            tokens.masked(tokens_of(b, x)),
            tokens.masked(tokens_of(w, x)),
            scale=1.0,
        )
        bonus = (upcast(r) * k * self.r_k).sum(-1, keepdim=True) * v
        y = ((self.g_norm(rows_of(o)) + bonus) * gate).to(o.dtype)
        y, new = tokens_of(self.o_proj(y.flatten(-2)), x), RecurrentState(recurrent, shift=shift)
        return (y, new, tokens_of(v_own, x)) if self.is_first else (y, new)

    def _checked(self, x: Tensor, v_first: Tensor | None) -> Tensor:
        if v_first is None:
            raise ValueError(
                "v_first must be given to a layer whose layer_idx is not 0: it is the third result of layer 0, got None"
            )
        _check.like(x, "v_first", v_first, (*x.shape[:2], self.value_dim))
        return distributed_like(x, v_first)

    def _mixed_values(self, own: Tensor, first: Tensor, x_v: Tensor) -> Tensor:
        v, share = upcast(own), upcast(self.v_lora(x_v)).sigmoid()
        return (v + (first - v) * share).to(own.dtype)

    def _divided_by_its_norm(self, kappa: Tensor) -> Tensor:
        if self.fuse_norm:
            return kappa * torch.rsqrt(kappa.square().sum(-1, keepdim=True) + 1e-6)
        return F.normalize(kappa, dim=-1, eps=1e-12)


def _heads(
    hidden_size: int, head_dim: int | None, num_heads: int | None, value_dim: int | None
) -> tuple[int, int, int]:
    """Check these arguments; return the number of heads and the head sizes K and V."""
    if num_heads is not None:
        _check.count("num_heads", num_heads)
    if head_dim is not None:
        _check.head_size("head_dim", head_dim)
        default = (
            " (64 is the default; give head_dim=None where num_heads is given)" if head_dim == 64 else ""
        )
        if hidden_size % head_dim != 0:
            raise ValueError(
                f"hidden_size must be a multiple of head_dim = {head_dim}, got {hidden_size}{default}"
            )
        H, K = hidden_size // head_dim, head_dim
        if num_heads not in (None, H):
            raise ValueError(
                f"num_heads must be hidden_size // head_dim = {H}, got {num_heads} with head_dim = {head_dim}{default}"
            )
    elif num_heads is not None:
        if hidden_size % num_heads != 0:
            raise ValueError(f"hidden_size must be a multiple of num_heads = {num_heads}, got {hidden_size}")
        H, K = num_heads, hidden_size // num_heads
        _check.head_size("hidden_size / num_heads", K)
    else:
        raise ValueError("head_dim or num_heads must be given, got None for both")
    values = hidden_size if value_dim is None else value_dim
    _check.count("value_dim", values)
    if values % H != 0:
        raise ValueError(f"value_dim must be a multiple of num_heads = {H}, got {values}")
    return H, K, values // H


def _rank(name: str, given: int | None, about: float) -> int:
    """The rank `given` or, if it is None, the multiple of 32 nearest to `about`."""
    if given is None:
        return max(32, round(about / 32) * 32)
    _check.count(name, given)
    return given


def place_of(layer_idx: int | None, num_hidden_layers: int | None) -> tuple[int, int]:
    """Check these arguments and return them; if one is None, return the arguments of a model of one layer."""
    if layer_idx is not None:
        _check.integer("layer_idx", layer_idx)
        _check.not_negative("layer_idx", layer_idx)
    if num_hidden_layers is not None:
        _check.count("num_hidden_layers", num_hidden_layers)
    if layer_idx is None or num_hidden_layers is None:
        return 0, 1
    if layer_idx >= num_hidden_layers:
        raise ValueError(
            f"layer_idx must be from 0 to num_hidden_layers - 1 = {num_hidden_layers - 1}, got {layer_idx}"
        )
    return layer_idx, num_hidden_layers


# Initialization, as in the authors' code.


def first_mix_(x: Tensor, power: float) -> None:
    """Weights of the previous token, which decrease over the channels ``x [..., D]`` from 1."""
    D = x.shape[-1]
    i = torch.arange(D, device=x.device, dtype=torch.float32)
    copy_(x, (1 - (i / D) ** power).expand(x.shape))


def _first_decays_(x: Tensor, head_dim: int, depth: float) -> None:
    """Biases of decays. `depth` is from 0 in the first layer of a model to 1 in the last."""
    copy_(x, 6 * (_evenly_spaced(x) + 0.5) ** (1 + depth**0.3) - 5.5 + 2.5 * _zigzag(x, head_dim))


def _first_rates_(x: Tensor, head_dim: int) -> None:
    copy_(x, -0.19 + 0.3 * _zigzag(x, head_dim) + 0.4 * _evenly_spaced(x))


def _first_shares_(x: Tensor) -> None:
    copy_(x, 0.73 - 0.4 * _evenly_spaced(x))


def _evenly_spaced(x: Tensor, size: int | None = None) -> Tensor:
    """Numbers for the channels ``x [D]``, evenly spaced from -1/2 to 1/2 over `size` channels; 0 for size 1."""
    D = x.shape[0] if size is None else size
    return (torch.arange(D, device=x.device, dtype=torch.float32) - (D - 1) / 2) / max(D - 1, 1)


def _zigzag(x: Tensor, head_dim: int) -> Tensor:
    """Numbers for the channels ``x [D]`` that rise from -1 to 1 in each head, mostly close to 0."""
    z = 2 * _evenly_spaced(x, head_dim)
    return (z * z.abs()).repeat(x.shape[0] // head_dim)
