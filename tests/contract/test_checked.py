"""`flacompose.checked`: what it finds, in whose words, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

import flacompose
from flacompose.layers import GatedLinearAttention
from flacompose.models import RecurrentConfig, RecurrentLM
from flacompose.ops import (
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_gla,
    chunk_kda,
    chunk_simple_gla,
    selective_scan_fn,
    selective_state_update,
)

from .cases import CASES, OpCase, every
from .problems import call, draw

PUBLIC = [case for case in CASES if not case.name.startswith(("bonus", "steps"))]
each_public_op = every(PUBLIC)


NOT_DECAYS = {"f", "s"}  # logits, which the contract's cases draw as gates


@each_public_op
def test_every_input_of_every_op(case: OpCase, device: torch.device) -> None:
    """Gates of -inf, and whatever a tail holds, are legal; NaN in a token, or a gate above 0, is found and named."""
    problem = draw(case, device, lengths=[5, 0, 4], tail=3, gates="rare")
    expected, _ = call(problem)
    of_tokens = [name for name in problem.tensors if "T" in case.axes[name]]
    for name in of_tokens:
        case.at(slice(9, None), {name: problem.tensors[name]}, "T")[name].fill_(torch.nan)
    with flacompose.checked():
        assert torch.equal(call(problem)[0], expected)
        for name in of_tokens:
            x = problem.tensors[name].clone()
            last = case.at(slice(8, 9), {name: x}, "T")[name]
            last.fill_(torch.nan)
            with pytest.raises(ValueError, match=rf"^{name} must be finite, got nan first at index \(0, "):
                call(problem, **{name: x})
            if name in {*case.gates} - NOT_DECAYS:
                last.fill_(0.5)
                with pytest.raises(
                    ValueError, match=rf"^{name} must be at most 0, .* got 0.5 first at index \(0, "
                ):
                    call(problem, **{name: x})


def inputs(T: int = 6, H: int = 2) -> list[torch.Tensor]:
    q, k, v, g = torch.randn(4, 1, T, H, 3)
    return [q, k, v, -g.abs()]


def test_a_decay_in_place_of_its_logarithm() -> None:
    q, k, v, g = inputs()
    with flacompose.checked():
        with pytest.raises(
            ValueError, match="in chunk_gla: these look like decays themselves, so give their log"
        ):
            chunk_gla(q, k, v, g.exp())
        with pytest.raises(ValueError, match=r"^g must be at most 0, .* index \(0, 0, 0\), 12 in all"):
            chunk_simple_gla(q, k, v, 1 + g[..., 0].abs())
        # What the gate is computed from may have any sign.
        chunk_kda(q, k, v, g.abs(), g[..., 0], use_gate_in_kernel=True, A_log=torch.zeros(2))
    chunk_gla(q, k, v, g.exp())  # outside, nothing is read


def test_layouts_that_look_head_first() -> None:
    with flacompose.checked():
        with pytest.warns(
            UserWarning, match="^q of chunk_gla has 2 tokens and 128 heads, .* is it head-first"
        ) as warned:
            chunk_gla(*inputs(T=2, H=128))
        assert warned[0].filename == __file__  # the user's line, not one of this package
        with pytest.warns(
            UserWarning, match="^q of chunk_gla of GatedLinearAttention has 2 tokens"
        ) as warned:
            GatedLinearAttention(hidden_size=128, num_heads=64)(torch.ones(1, 2, 128))
        assert warned[0].filename == __file__  # nor one of PyTorch, which calls the layer
        for T, H in ((1, 128), (2, 63), (64, 64)):
            chunk_gla(*inputs(T, H))


def test_one_token_of_mamba() -> None:
    state, x, dt, A, B = torch.zeros(1, 8, 4), *torch.ones(2, 1, 8), -torch.ones(8, 4), torch.ones(1, 4)
    with flacompose.checked():
        selective_state_update(state, x, dt, A, B, B)
        with pytest.raises(ValueError, match=r"^state must be finite, got nan .* in selective_state_update$"):
            selective_state_update(state / 0, x, dt, A, B, B)


def test_layers_and_models() -> None:
    """The error names the layer whose op got what is wrong, and of a state which part it is."""
    torch.manual_seed(0)
    config = RecurrentConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=2, intermediate_size=32, layer="GatedLinearAttention",
        layer_options={"num_heads": 2},
    )  # fmt: skip
    model = RecurrentLM(config)
    ids = torch.arange(5)[None]
    with flacompose.checked():
        model(ids)
        layer = next(x for x in list(model.modules())[::-1] if isinstance(x, GatedLinearAttention))
        with torch.no_grad():
            layer.v_proj.weight[3] = torch.inf
        with pytest.raises(
            ValueError, match=r"^v must be finite, .* of GatedLinearAttention with layer_idx=1$"
        ):
            model(ids)


def test_compiled_functions_run_as_they_are() -> None:
    """So that the ops in them are checked too; and it is not entered in a graph, which would hold no check."""
    compiled = torch.compile(chunk_gla, fullgraph=True, backend="eager")
    q, k, v, g = inputs()
    compiled(q, k, v, g.abs())
    with flacompose.checked(), pytest.raises(ValueError, match="^g must be at most 0"):
        compiled(q, k, v, g.abs())
    compiled(q, k, v, g.abs())

    def within(g: torch.Tensor) -> torch.Tensor:
        with flacompose.checked():
            return chunk_gla(q, k, v, g)[0]

    with pytest.raises(
        RuntimeError, match="^RuntimeError: flacompose.checked.. must be entered outside of compiled"
    ):
        torch.compile(within, fullgraph=True, backend="eager")(g)


def test_the_last_context_leaves_the_stance(device: torch.device) -> None:
    """Whichever was entered first, as contexts of two threads may be left, and one that is entered twice."""
    first, second = flacompose.checked(), flacompose.checked()
    compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
    x = torch.zeros(1)
    for order in ((first, second), (first, first)):
        for context in order:
            context.__enter__()
        order[0].__exit__(None, None, None)
        assert not compiled(x)
        order[1].__exit__(None, None, None)
        assert compiled(x)


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
@pytest.mark.parametrize("op", [chunk_gated_delta_rule, chunk_kda, chunk_gdn2])
def test_parameters_of_gates(op, name: str) -> None:
    x = torch.randn(1, 5, 2, 4)
    per_head = op is chunk_gated_delta_rule
    given = {"q": x, "k": x, "v": x, "g": x[..., 0] if per_head else x, "use_gate_in_kernel": True}
    given |= {"b": x, "w": x} if op is chunk_gdn2 else {"beta": x[..., 0]}
    parameters = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2 if per_head else 8)}
    parameters[name][1] = torch.nan
    with (
        flacompose.checked(),
        pytest.raises(ValueError, match=rf"^{name} must be finite, got nan first at index \(1,\)"),
    ):
        op(**given, **parameters)


def test_rates_and_steps() -> None:
    """A rate above 0 and a time step below 0 make decays above 1; neither is the logarithm of one."""
    x, A, B = torch.rand(1, 5, 4), -torch.rand(4, 3), torch.rand(1, 5, 3)
    with flacompose.checked():
        selective_scan_fn(x, x, A, B, B)
        selective_scan_fn(x, -x, A, B, B, delta_softplus=True)
        with pytest.raises(
            ValueError, match=r"^A must be at most 0, as a rate .*: of a checkpoint, give -exp"
        ):
            selective_scan_fn(x, x, -A, B, B)
        with pytest.raises(ValueError, match=r"^delta must be at least 0 where it passes no softplus"):
            selective_scan_fn(x, -x, A, B, B)
        with pytest.raises(ValueError, match=r"^dt must be at least 0 where it passes no softplus"):
            selective_state_update(torch.zeros(1, 4, 3), x[0, :1], -x[0, :1], A, B[0, :1], B[0, :1])


def test_tensors_without_values() -> None:
    x = torch.rand(2, 1, 5, 2, 4)
    with flacompose.checked():
        chunk_gla(*torch.rand(4, 1, 5, 2, 4, device="meta"))
        with pytest.raises(RuntimeError, match=r"^flacompose.checked\(\) reads values, and q has none here"):
            torch.vmap(chunk_gla)(x, x, x, -x)
