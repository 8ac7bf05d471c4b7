"""One token of every recurrence with a matrix state, in PyTorch: one step of `matrix_token_kernel`."""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._tensors.dtype import state_dtype, upcast


def token(
    q: Tensor,  # [B, 1, H, K]
    k: Tensor,  # [B, 1, H, K]
    v: Tensor,  # [B, 1, HV, V]
    initial_state: Tensor | None,  # [B, HV, K, V]
    cu_seqlens: None,
    scale: float,
    *,
    g: Tensor | None = None,  # [B, 1, HV]
    g_gamma: Tensor | None = None,  # [HV]
    gk: Tensor | None = None,  # [B, 1, HV, K]
    gv: Tensor | None = None,  # [B, 1, HV, V]
    u: Tensor | None = None,  # [H, K]
    beta: Tensor | None = None,  # [B, 1, HV]
    a: Tensor | None = None,  # [B, 1, H, K]
    b: Tensor | None = None,  # [B, 1, H, K]
    read_before: bool = False,
    delta_rule: bool = False,
    softmax: bool = False,
    full_precision: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(o [B, 1, HV, V], final_state [B, HV, K, V])``, for the arguments of `operands.recurrent`."""
    dtype = state_dtype(q.dtype)
    o_dtype = dtype if full_precision else v.dtype
    if softmax:
        q = q.softmax(-1, dtype=dtype)
    q, k, v, a = (upcast(x[:, 0]) for x in (q, k, v, k if a is None else a))
    groups = v.shape[1] // q.shape[1]
    if groups > 1:
        q, k, a = (x.repeat_interleave(groups, 1) for x in (q, k, a))

    # 1. The state decays.
    before = S = None if initial_state is None else initial_state.to(dtype)
    if S is not None:
        log_decays = [x.to(dtype) for x in (None if g is None else g[:, 0], g_gamma) if x is not None]
        if log_decays:
            S = S * sum(log_decays[1:], start=log_decays[0])[..., None, None].exp()
        if gk is not None:
            S = S * gk[:, 0, :, :, None].to(dtype).exp()
        if gv is not None:
            S = S * gv[:, 0, :, None, :].to(dtype).exp()
    # 2. The low-rank update: `b` writes the read of `a`.
    if b is not None and before is not None and S is not None:
        S = S + upcast(b[:, 0]).unsqueeze(-1) * (a.unsqueeze(-2) @ (before if read_before else S))
    # 3. The write of the token. The delta rule first subtracts the read of its key, or of `a`.
    if delta_rule and before is not None and S is not None:
        v = v - (a.unsqueeze(-2) @ (before if read_before else S)).squeeze(-2)
    if beta is not None:
        v = v * beta[:, 0, :, None].to(dtype)
    written = k.unsqueeze(-1) * v.unsqueeze(-2)
    S = written if S is None else written + S
    # 4. The query reads the new state, or, with a bonus for the token, the state before.
    read = S
    if u is not None:
        read = u.to(dtype).unsqueeze(-1) * written
        read = read if before is None else read + before
    o = ((q * scale).unsqueeze(-2) @ read).squeeze(-2)
    return o.unsqueeze(1).to(o_dtype, copy=True), S.contiguous()  # an op returns no view
