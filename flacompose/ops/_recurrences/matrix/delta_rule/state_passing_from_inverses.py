"""Launches of forward passes on Hopper, whose state passing takes only the inverses of chunks."""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._recurrences.matrix.delta_rule.state_passing import Sweeps


class InverseSweeps(Sweeps):
    """State passing of one call, from the inverses Y of chunks in place of W and P if it `takes_inverses`.

    A subclass sets `q`, `k` and `beta`.
    """

    q: Tensor
    k: Tensor
    beta: Tensor
    takes_inverses = False

    def inverses(self) -> None:
        """Fill `Y`, the inverses that `hopper/state_passing` takes."""
        from flacompose.ops._recurrences.matrix.delta_rule.hopper.head_factors import hopper_inverse_kernel

        self.HK = self.q.shape[2]
        Y = self.per_chunk(self.HV, self.C, self.C, dtype=self.dtype)
        self.factors |= {"q": self.q, "k": self.k, "Y": Y}
        if self.gates["sums"] is not None:
            self.bound_growth(tiles=1)
        launch(
            hopper_inverse_kernel,
            (self.chunks * self.HV,),
            k=self.k,
            beta=self.beta,
            sums=self.gates["sums"],
            Y=Y,
            growth=self.growth,
            **self.positions,
            H=self.HK,
            HV=self.HV,
            K=self.K,
            C=self.C,
            num_warps=4,
            maxnreg=96,
        )

    def _sweep(self, V: int | None = None, IDENTITY: bool = False, **tensors: Tensor | None) -> None:
        if not self.takes_inverses:
            super()._sweep(V, IDENTITY, **tensors)
            return
        from flacompose.ops._recurrences.matrix.delta_rule.hopper.state_passing import (
            hopper_state_passing_kernel,
        )

        V = self.V if V is None else V
        given: dict[str, Tensor | None] = dict.fromkeys(("v", "initial", "o", "ends", "final"))
        given |= tensors
        factors = {name: self.factors[name] for name in ("q", "k", "Y")}
        sizes = {"v_token": self.v_token, "V": V, "IDENTITY": IDENTITY}
        shared = self._of_sweeps(given["ends"])
        del shared["DOT"], shared["READ_BEFORE"]
        launch(
            hopper_state_passing_kernel,
            (self.parts * self.N * self.HV,),
            **given,
            **factors,
            **shared,
            **sizes,
            beta=self.beta,
            sums=self.gates["sums"],
            num_warps=V // 16,
        )
