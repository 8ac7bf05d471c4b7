"""Mamba-3, https://arxiv.org/abs/2603.15569, under the names that mamba-ssm gives it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose._errors import TypeError, ValueError
from flacompose.ops._arguments import require
from flacompose.ops._composed.mamba3 import Scanned, States, scan
from flacompose.ops._operators.checked import check_values, checking
from flacompose.ops._tensors.dtype import autocast_dtype, upcast
from flacompose.ops._tensors.packed import without_tail

Final = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def mamba3_siso_combined(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | Any:
    r"""Mamba-3's scan of a sequence with one key and one query per token.

    $$\theta_t = \theta_{t-1} + \pi \tanh(Angles_t)\, DT_t \qquad
    k_t = R(\theta_t) (K_t + K\_bias) \qquad q_t = R(\theta_t) (Q_t + Q\_bias)$$
    $$S_t = e^{ADT_t} \bigl(S_{t-1} + (1 - \lambda_t)\, DT_t\, v_{t-1} k_{t-1}^\top\bigr)
    + \lambda_t\, DT_t\, v_t k_t^\top \qquad \lambda_t = \operatorname{sigmoid}(Trap_t)$$
    $$out_t = (S_t q_t + D\, v_t) \odot \operatorname{silu}(Z_t)$$

    From "Mamba-3: Improved Sequence Modeling using State Space Principles" (<https://arxiv.org/abs/2603.15569>). The
    trapezoidal rule writes a part of each token at the next token. ``R`` rotates the neighbouring numbers ``2 i`` and
    ``2 i + 1`` by the ``i``-th of ``A`` angles; further numbers are not rotated. A single token takes the recurrent
    form. Time steps, gates and angles are ``[B, T, H]``; in mamba-ssm they are ``[B, H, T]``.

    Args:
        Q: Queries, ``[B, T, G, S]``, in the dtype of `V`; ``S`` is even, ``G`` divides ``H``, and head ``h`` has group
            ``h // (H / G)``.
        K: Keys, ``[B, T, G, S]``, in the dtype of `V`.
        V: Values, ``[B, T, H, P]``, in float32, bfloat16, float16 or float64.
        ADT: Log decays, ``[B, T, H]``, from 0 to -inf, in any float dtype, like all the following.
        DT: Time steps, ``[B, T, H]``, at least 0.
        Trap: Logits of the share of a token that is written at the token itself, ``[B, T, H]``.
        Q_bias: Added to the queries of each head, ``[H, S]``.
        K_bias: Added to the keys of each head, ``[H, S]``.
        Angles: Rotation speed of each pair, ``[B, T, H, A]``, or ``[B, T, 1, A]`` for all heads; ``A`` is from 1 to
            ``S / 2``.
        D: Weight of the skip connection from values to output, ``[H]``. Default: nothing.
        Z: Gate of the output, ``[B, T, H, P]``, through silu. Default: none.
        Input_States: The four states before the first token, ``(angle, state, k, v)``, in any float dtype. Default:
            zeros.
        chunk_size: Accepted for compatibility with mamba-ssm, and not used: it changes no result.
        return_final_states: Whether to return the states after the last token too.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``out``, ``[B, T, H, P]`` in the dtype of `V`, or of autocast where it is on; or ``(out, angle, state, k, v)``,
            where all but `out` are new tensors: the angles from -pi to pi, ``[N, H, A]``, and the states,
            ``[N, H, P, S]``, in float32 (float64 for float64 inputs); the last keys, biased and rotated, ``[N, H, S]``,
            and the last values, ``[N, H, P]``, in the dtype of `out`.

    Raises:
        ValueError: If a shape or a device is wrong, or ``P`` or ``S`` is above 512.
        TypeError: If an argument has the wrong type or dtype.
    """
    past = _check_all(
        Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, Input_States, chunk_size, cu_seqlens, rank=None
    )
    require.flags(return_final_states=return_final_states)
    inputs = Scanned(
        Q.unsqueeze(2), K.unsqueeze(2), V, ADT, DT, Trap, Q_bias.unsqueeze(1), K_bias.unsqueeze(1), Angles, D, None,
        Z,
    )  # fmt: skip
    inputs = _in_sequences(inputs, cu_seqlens)
    if past.k is not None:
        past = past._replace(k=past.k.unsqueeze(1))
    y, new = scan(inputs, past, cu_seqlens, final=return_final_states, values_first=True)
    if return_final_states:
        new = new._replace(k=new.k.squeeze(1))
    return _results(y.squeeze(2), new, return_final_states)


def mamba3_mimo_combined(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor,
    MIMO_Z: Tensor | None,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    chunk_size: int = 16,
    rotary_dim_divisor: int = 4,
    dtype: torch.dtype | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    fuse_pregate_headwise_rms_norm: bool = False,
    outproj_norm_weight: Tensor | None = None,
    outproj_norm_eps: float = 1e-5,
    Input_States: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Tensor | Any:
    r"""Mamba-3's scan of a sequence with ``R`` keys and ``R`` queries per token and state.

    It is [mamba3_siso_combined][flacompose.ops.mamba3_siso_combined] with a sum over keys in each write,

    $$v_t k_t^\top \to \sum_r (v_t \odot MIMO\_V_r)\, k_{t,r}^\top \qquad
    y_{t,r} = S_t q_{t,r} + D\, (v_t \odot MIMO\_V_r)$$
    $$out_t = \sum_r MIMO\_Out_r \odot y_{t,r} \odot \operatorname{silu}(MIMO\_Z_r \odot Z_t)$$

    and other pairs: the numbers ``i`` and ``i + S / 2`` of a key are rotated together.

    Args:
        Q: Queries, ``[B, T, R, G, S]``, in the dtype of `V`.
        K: Keys, ``[B, T, R, G, S]``, in the dtype of `V`.
        V: Values, ``[B, T, H, P]``, in float32, bfloat16, float16 or float64.
        ADT: This and all arguments that are not listed here are as in
            [mamba3_siso_combined][flacompose.ops.mamba3_siso_combined].
        Q_bias: Added to the queries of each head, ``[H, R, S]``.
        K_bias: Added to the keys of each head, ``[H, R, S]``.
        MIMO_V: Factors of the values of each key, ``[H, R, P]``.
        MIMO_Z: Factors of the gates of each query, ``[H, R, P]``. Required with `Z`, otherwise not used.
        MIMO_Out: Weights of the sum of outputs, ``[H, R, P]``, or None for no sum.
        chunk_size: Accepted for compatibility with mamba-ssm, and not used: it changes no result.
        rotary_dim_divisor: ``S // A``, where ``A`` is the number of `Angles`.
        dtype: Accepted for compatibility with mamba-ssm, and not used: products have the dtype of `V`.
        return_state: Whether to return the states after the last token too.
        fuse_pregate_headwise_rms_norm: Whether each $y_{t,r}$ of a head is divided by its root mean square before the
            gate.
        outproj_norm_weight: Weight of this norm, ``H * P`` numbers in any shape. Default: ones.
        outproj_norm_eps: Added to the mean square in this norm.
        Input_States: The four states before the first token, ``(angle, state, k, v)``, in any float dtype. Default:
            zeros.

    Returns:
        ``out``, ``[B, T, H, P]``, or without `MIMO_Out` ``[B, T, R, H, P]``, in the dtype of `V`, or under autocast in
            its dtype; or ``(out, angle, state, k, v)``, where `k` is ``[N, R, H, S]``.

    Raises:
        ValueError: If a shape or a device is wrong, or ``P`` or ``S`` is above 512.
        TypeError: If an argument has the wrong type or dtype.
    """
    require.axes("Q", Q, ("B", "T", "R", "G", "S"))
    R = Q.shape[2]
    past = _check_all(
        Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, Input_States, chunk_size, cu_seqlens, rank=R
    )
    H, P = V.shape[2:]
    require.like(V, "MIMO_V", MIMO_V, (H, R, P), q_name="V")
    require.optional(V, "MIMO_Z", MIMO_Z, (H, R, P), q_name="V")
    if Z is not None and MIMO_Z is None:
        raise TypeError("MIMO_Z must be a tensor where Z is given, got NoneType")
    require.optional(V, "MIMO_Out", MIMO_Out, (H, R, P), q_name="V")
    if checking():
        check_values({"MIMO_V": MIMO_V, "MIMO_Z": MIMO_Z, "MIMO_Out": MIMO_Out})
    require.count("rotary_dim_divisor", rotary_dim_divisor)
    S, A = Q.shape[-1], Angles.shape[-1]
    if A != S // rotary_dim_divisor:
        raise ValueError(
            f"Angles must have S // rotary_dim_divisor = {S // rotary_dim_divisor} angles, got {A}: "
            "give the rotary_dim_divisor of these"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
    require.flags(return_state=return_state, fuse_pregate_headwise_rms_norm=fuse_pregate_headwise_rms_norm)
    require.parameter(V, "outproj_norm_weight", outproj_norm_weight, (H, P), q_name="V")
    require.not_negative("outproj_norm_eps", outproj_norm_eps)

    inputs = Scanned(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, MIMO_V)
    inputs = _in_sequences(inputs, cu_seqlens)
    y, new = scan(inputs, past, cu_seqlens, halves=True, final=return_state, values_first=True)
    if fuse_pregate_headwise_rms_norm:
        weight = None if outproj_norm_weight is None else outproj_norm_weight.reshape(H, P)
        y = normed(y, weight, outproj_norm_eps)
    y = mixed(y, None if Z is None else without_tail(cu_seqlens, Z)[0], MIMO_Z, MIMO_Out)
    dtype = None if V.dtype == torch.float64 else autocast_dtype(V.device)
    (y,) = without_tail(cu_seqlens, y.to(V.dtype if dtype is None else dtype))
    return _results(y, new, return_state)


def normed(y: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``y [..., H, P]``, each head divided by its root mean square, and multiplied by ``weight [H, P]``."""
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def mixed(y: Tensor, z: Tensor | None, mimo_z: Tensor | None, mimo_out: Tensor | None) -> Tensor:
    """The outputs of ``R`` queries, ``y [B, T, R, H, P]``, gated by ``z [B, T, H, P]`` and, with `mimo_out`, summed."""
    if z is not None and mimo_z is not None:
        y = y * F.silu(upcast(z, y).unsqueeze(2) * mimo_z.transpose(0, 1))
    return y if mimo_out is None else (y * mimo_out.transpose(0, 1)).sum(2)


def _check_all(
    Q: Any, K: Any, V: Any, ADT: Any, DT: Any, Trap: Any, Q_bias: Any, K_bias: Any, Angles: Any, D: Any, Z: Any,
    given: Any, chunk_size: Any, cu_seqlens: Any, rank: int | None,
) -> States:  # fmt: skip
    """Check the arguments of both functions, with `rank` keys per token, or None for one; return the initial states."""
    require.axes("V", V, ("B", "T", "H", "P"))
    B, T, H, P = V.shape
    R = () if rank is None else (rank,)
    require.axes("Q", Q, ("B", "T", *["R"] * len(R), "G", "S"))
    G, S = Q.shape[-2:]
    for name, x in (("Q", Q), ("K", K)):
        require.like(V, name, x, (B, T, *R, G, S), q_name="V")
        require.same_dtype(V, name, x, q_name="V")
    if G == 0 or H % G != 0:
        raise ValueError(f"Q must have a number of groups that divides the {H} heads of V, got {G}")
    require.head_size("V", V)
    require.head_size("Q", Q, size_of="state")
    if S % 2 != 0:
        raise ValueError(f"Q must have an even state size, since its numbers are rotated in pairs, got {S}")
    N = require.sequences(V, cu_seqlens, q_name="V")
    for name, x in (("ADT", ADT), ("DT", DT), ("Trap", Trap)):
        require.like(V, name, x, (B, T, H), q_name="V")
    for name, x in (("Q_bias", Q_bias), ("K_bias", K_bias)):
        require.like(V, name, x, (H, *R, S), q_name="V")
    require.axes("Angles", Angles, ("B", "T", "H", "A"))
    heads, A = Angles.shape[2:]
    require.like(V, "Angles", Angles, (B, T, 1 if heads == 1 else H, A), q_name="V")
    if not 1 <= A <= S // 2:
        raise ValueError(f"Angles must have from 1 to S / 2 = {S // 2} angles, got {A}")
    require.optional(V, "D", D, (H,), q_name="V")
    require.optional(V, "Z", Z, V.shape, q_name="V")
    require.count("chunk_size", chunk_size)
    if checking():
        values = {
            "V": V,
            "Q": Q,
            "K": K,
            "ADT": ADT,
            "DT": DT,
            "Trap": Trap,
            "Q_bias": Q_bias,
            "K_bias": K_bias,
        }
        check_values(
            values | {"Angles": Angles, "D": D, "Z": Z}, cu_seqlens, gates=("ADT",), lowest=("Trap",)
        )
    if given is None:
        return States()
    if not isinstance(given, (tuple, list)) or len(given) != 4:
        raise TypeError(f"Input_States must be a tuple (angle, state, k, v), got {require.kind(given)}")
    shapes = ((N, H, A), (N, H, P, S), (N, *R, H, S), (N, H, P))
    for i, (x, shape) in enumerate(zip(given, shapes, strict=True)):
        require.like(V, f"Input_States[{i}]", x, shape, q_name="V")
    return States(*given)


def _in_sequences(inputs: Scanned, cu_seqlens: Tensor | None) -> Scanned:
    """`inputs` with zeros for tokens in no sequence, so that these change no gradient."""
    names = ("Q", "K", "V", "ADT", "DT", "Trap", "Angles")
    tokens = without_tail(cu_seqlens, *(getattr(inputs, name) for name in names))
    return inputs._replace(**dict(zip(names, tokens, strict=True)))


def _results(y: Tensor, new: States, states: bool) -> Tensor | Final:
    """The output, or with `states` the output and the new states."""
    return (y, *new) if states else y
