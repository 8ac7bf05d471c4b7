"""Launches fit on every chip from Ampere on: here those that want most, and all by ``make fit``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import product
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from helpers.launches import CHIPS, Call, Launch, every_call, matrix_calls, recorded, tables_of  # noqa: E402
from helpers.operators import flat  # noqa: E402

from flacompose.ops._launch.chip import ADA, HOPPER, Chip, chip_of, is_here  # noqa: E402
from flacompose.ops._recurrences.matrix import cuda as matrix  # noqa: E402
from flacompose.ops._recurrences.matrix.channel_decay import cuda as channel_decay  # noqa: E402
from flacompose.ops._recurrences.matrix.delta_rule import plan as delta_rule_plan  # noqa: E402
from flacompose.ops._recurrences.matrix.head_decay import cuda as head_decay  # noqa: E402
from flacompose.ops._recurrences.matrix.inputs import SIGNATURE, Inputs  # noqa: E402

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
STATE = "channel_decay gk gv ", "channel_decay_state_passing_kernel", BFLOAT16, 128, 128, {}
# The first launch of a kernel by these calls with these constants: of each chip some that take the most of its memory.
# All of them everywhere would take hours.
LARGEST = [
    (("head_decay  ", "head_decay_state_passing_kernel", BFLOAT16, 128, 128, {"REVERSE": True}), 100),
    (("head_decay g ", "head_decay_state_passing_kernel", BFLOAT16, 256, 256, {"REVERSE": True}), 120),
    (
        (
            "head_decay g_gamma",
            "head_decay_state_passing_kernel",
            BFLOAT16,
            256,
            256,
            {"REVERSE": True, "FINE": True},
        ),
        86,
    ),
    (("head_decay g", "head_decay_gradient_kernel", BFLOAT16, 128, 128, {"C": 128}), 120),
    (("delta_rule g", "delta_both_directions_kernel", BFLOAT16, 256, 64, {}), 90),
    # More values than a head has, as a batch of many heads has more tiles of them.
    (("delta_rule g", "delta_backward_state_passing_kernel", BFLOAT16, 256, 6400, {"BV": 128}), 90),
    (("delta_rule g", "delta_state_passing_kernel", BFLOAT16, 128, 6400, {}), 100),
    (("low_rank gk", "delta_backward_state_passing_kernel", BFLOAT16, 128, 6400, {}), 100),
    (("delta_rule gk", "channel_gradient_kernel", BFLOAT16, 64, 64, {}), 80),
    (("delta_rule gk", "channel_gradient_kernel", BFLOAT16, 64, 64, {}), 89),
    (("delta_rule gk", "channel_factor_kernel", FLOAT32, 64, 64, {}), 86),
    (("delta_rule gk", "channel_factor_kernel", FLOAT32, 320, 64, {}), 100),
    (("low_rank gk", "low_rank_product_kernel", FLOAT32, 64, 64, {}), 120),
]


def launch_of(
    chip: Chip, start: str, kernel: str, dtype: torch.dtype, K: int, V: int, constants: dict[str, Any]
) -> Launch:
    def has(launch: Launch) -> bool:
        return launch.name.endswith(kernel) and constants.items() <= launch.given.items()

    with tables_of(chip):
        found = recorded(call for call in matrix_calls(dtype, K, V, 130) if call.at.startswith(start))
    return next(launch for launch in found if has(launch))


@pytest.mark.parametrize(("largest", "capability"), LARGEST)
def test_fits(largest: tuple[Any, ...], capability: int) -> None:
    assert launch_of(CHIPS[capability], *largest).excess(capability) is None


# With another vector that reads, which takes more memory than a call without.
SIDE_BY_SIDE = [
    ("head_gradient_kernel", {"ADDS": False}, 2, "delta_rule g a before"),
    ("factor_kernel", {}, 3, "delta_rule g a before"),
    ("delta_both_directions_kernel", {}, 2, "delta_rule g a before"),
    ("channel_factor_kernel", {}, 2, "delta_rule gk a"),
    ("channel_block_gradient_kernel", {}, 2, "delta_rule gk a"),
]


@pytest.mark.parametrize(("kernel", "constants", "programs", "start"), SIDE_BY_SIDE)
def test_programs_side_by_side(kernel: str, constants: dict[str, Any], programs: int, start: str) -> None:
    """These kernels leave room for others on a multiprocessor, where each program takes 1 KiB more."""
    launch = launch_of(HOPPER, start, kernel, BFLOAT16, 128, 128, constants)
    assert "channel" not in kernel or "hopper" in launch.module
    assert programs * (launch.memory(90)["shared"] + 1024) <= HOPPER.shared_memory + 1024
    options = dict(launch.options)
    assert programs * 32 * options["num_warps"] * options.get("maxnreg", 255) <= 65536


def test_state_passing_in_gluon_fits() -> None:
    """Two groups of warps share most of the memory of a multiprocessor."""
    q = torch.empty(1, 130, 2, 128, dtype=BFLOAT16, device="meta")
    beta = torch.empty(1, 130, 2, device="meta")
    args = (*Inputs(q, q, q, beta, beta=beta, delta_rule=True),)
    with tables_of(HOPPER):
        found = recorded([Call("", flat(matrix, "chunk"), "matrix_recurrence_chunk", args)])
    (passing,) = (launch for launch in found if launch.name == "hopper_head_state_passing_kernel")
    assert passing.module.endswith("hopper.head_state_passing") and dict(passing.options)["num_warps"] == 8
    assert passing.excess(90) is None


@pytest.mark.parametrize(("rows", "D"), [(66, 128), (132, 64)])
def test_head_backward_in_gluon_fits(rows: int, D: int) -> None:
    """Of heads of 64, two programs side by side."""
    q = torch.empty(rows, 130, 2, D, dtype=BFLOAT16, device="meta")
    beta = torch.empty(rows, 130, 2, device="meta")
    inputs = Inputs(q, q, q, beta, beta=beta, delta_rule=True)
    mask = [getattr(inputs, x) is not None for x in SIGNATURE.differentiable]
    args = *inputs, q, None, mask
    with tables_of(HOPPER):
        found = recorded([Call("", flat(matrix, "backward"), "matrix_recurrence_backward", args)])
    (backward,) = (launch for launch in found if launch.name == "hopper_head_backward_kernel")
    programs = delta_rule_plan.RESIDENT_PROGRAMS[D] // 132
    assert programs * (backward.memory(90)["shared"] + 1024) <= HOPPER.shared_memory + 1024


def test_what_does_not_fit_is_seen() -> None:
    """The table of large chips is not for small ones."""
    assert launch_of(HOPPER, *STATE).excess(120) == "106496 bytes of shared memory, of 101376"
    assert launch_of(ADA, *STATE).excess(120) is None


SIZES = (1, 16, 20, 32, 40, 64, 65, 80, 96, 128, 129, 192, 200, 256, 257, 300, 320, 384, 385, 512)
BOTH = (True, False)


def configurations(function: Any, *choices: Any) -> Iterator[tuple[Any, Any]]:
    for args in product(*choices):
        yield args, tuple((name, x) for name, x in function(HOPPER, *args).items() if name != "KEEP")


@pytest.mark.parametrize(
    ("function", "choices", "digest"),
    [
        (channel_decay.plan.state_config, (BOTH, SIZES, SIZES, BOTH), "09d7c8cc24547c9d"),
        (head_decay.plan.state_passing_config, (BOTH, (32, 64), SIZES, SIZES), "f2cac5c1c9c6909a"),
        (delta_rule_plan.state_passing_config, (BOTH, SIZES, SIZES, (2, 64, 1000)), "76be16f5a545c7fa"),
        (delta_rule_plan.join_config, (BOTH, SIZES), "65fbc21e32172651"),
        (delta_rule_plan.channel_gradient_config, (BOTH,), "52e3d26836d43c16"),
        (delta_rule_plan.channel_factor_config, (BOTH, SIZES), "c60be015d29a92d4"),
    ],
    ids=["channel_state", "head_state", "delta_state", "join", "channel", "channel_pair"],
)
def test_what_was_tuned_on_hopper_stays(function: Any, choices: Any, digest: str) -> None:
    """These were measured on an H100, and compared with the reference there. After a change, measure them again."""
    table = [*configurations(function, *choices)]
    assert sha256(repr(table).encode()).hexdigest()[:16] == digest
    if function is delta_rule_plan.channel_factor_config:  # with more keys in float32 it did not fit before
        assert [K for K in SIZES if not function(HOPPER, True, K)["KEEP"]] == [K for K in SIZES if K > 128]
        assert [K for K in SIZES if not function(HOPPER, False, K)["KEEP"]] == [384, 385, 512]


@pytest.mark.parametrize("capability", CHIPS)
def test_products_in_bfloat16_stay_wide(capability: int) -> None:
    """A smaller chip's tables are no narrower than those checked on Hopper: Triton 3.6 miscompiles what is."""
    chip = CHIPS[capability]
    for K, V in product(SIZES, SIZES):
        for args in product((K,), (V,), BOTH):
            mine, hopper = (channel_decay.plan.state_config(x, True, *args) for x in (chip, HOPPER))
            assert (mine["BK"], mine["BV"]) == (hopper["BK"], hopper["BV"])
        for C in (32, 64):
            config = head_decay.plan.state_passing_config(chip, True, C, K, V)
            assert min(config[name] for name in ("BD1", "BD2", "BP")) == 64
    assert {delta_rule_plan.channel_gradient_config(chip, True)[name] for name in ("BK", "BV")} == {64}


@pytest.mark.parametrize(
    ("group", "tokens"), [(1, 128), (2, 64), (16, 64), (17, 128), (32, 128), (33, 64), (37, 64), (80, 128)]
)
def test_chunks_of_groups(group: int, tokens: int) -> None:
    """Long ones where a program takes more than 16 of the heads that share keys, as measured."""
    assert head_decay.plan.chunk_size(True, 32, True, group, 128, 128) == tokens
    if group > 1:  # and otherwise not
        for bfloat16, K, fine in ((False, 128, False), (True, 64, False), (True, 128, True)):
            assert head_decay.plan.chunk_size(bfloat16, 32, True, group, K, 128, fine) == 64


def test_tiles_of_head_decay_are_padded_least() -> None:
    for D in range(1, 513):
        size = head_decay.plan.state_passing_config(HOPPER, True, 32, D, D)["BD1"]
        tiles = -(-D // size)
        assert tiles == -(-D // 256)
        assert tiles * size - D < 64 * tiles
        assert size % 64 == 0 and size <= 256


class Properties:
    """Of a GPU that is not here."""

    def __init__(self, name: str, shared_memory: int, major: int, minor: int) -> None:
        self.name, self.shared_memory_per_block_optin = name, shared_memory
        self.major, self.minor = major, minor


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Properties]:
    """Two that PyTorch believes to be here, the first of which is the current one."""
    here = [Properties("NVIDIA H100", 232448, 9, 0), Properties("NVIDIA RTX 4090", 101376, 8, 9)]

    def properties(device: Any) -> Properties:
        return here[0 if device is None else torch.device(device).index or 0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return here


def test_the_chip_is_that_of_the_tensors(gpus: list[Properties]) -> None:
    assert chip_of(torch.device("cuda", 0)) == HOPPER
    assert chip_of(torch.device("cuda", 1)) == ADA
    # Kernels are compiled ahead of their launches on meta tensors, which stand for those of the current device.
    assert chip_of(torch.device("meta")) == HOPPER
    gpus.reverse()
    assert chip_of(torch.device("meta")) == ADA
    assert not is_here(torch.device("cuda", 2)) and chip_of(torch.device("cuda", 2)) == HOPPER


def test_without_a_gpu_it_is_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may be traced for a GPU that is not here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chip_of(torch.device("cuda", 0)) == chip_of(torch.device("cpu")) == HOPPER


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that GPUs are here")
@pytest.mark.parametrize("first", [0, 1])
def test_kernels_ahead_are_those_of_the_device(gpus: list[Properties], first: int) -> None:
    if first:
        gpus.reverse()
    q = torch.empty(1, 130, 2, 128, dtype=BFLOAT16, device="meta")
    args = (*Inputs(q, q, q, gk=q, gv=q),)
    calls = [Call("", flat(matrix, "chunk"), "matrix_recurrence_chunk", args)]
    stages = [
        dict(launch.options)["num_stages"]
        for launch in recorded(calls)
        if launch.name == "channel_decay_state_passing_kernel"
    ]
    assert stages == [2 if first else 3]


@pytest.fixture(scope="module")
def launches() -> dict[Launch, str]:
    return recorded(every_call([BFLOAT16], [(64, 64), (256, 64)]))


def test_every_kernel_is_recorded(launches: dict[Launch, str]) -> None:
    """What `make fit` compiles has every kernel of every recurrence in it."""
    names = {f"{launch.module}.{launch.name}" for launch in launches}
    modules = {
        module
        for module in sys.modules
        if module.startswith(("flacompose.ops._recurrences.", "flacompose.ops._tiles."))
    }
    kernels = {
        f"{x.fn.__module__}.{name}"
        for module in modules
        for name, x in vars(sys.modules[module]).items()
        if isinstance(x, triton.JITFunction) and name.endswith("_kernel")
    }
    assert len(kernels) >= 19 and names == kernels


def absent(launch: Launch) -> frozenset[int]:
    """The places of the arguments that a launch leaves out."""
    return frozenset(i for i, value in launch.constants if value is None)


def parse(launches: Iterable[tuple[Launch, str]]) -> None:
    for launch, at in launches:
        try:
            launch.parse(90)
        except triton.CompilationError as error:
            pytest.fail(f"{at}: {launch}: {error}")


def test_every_recorded_launch_can_be_made(launches: dict[Launch, str]) -> None:
    """What `make fit` compiles leaves out no argument that its kernel needs.

    Of each kernel the launch with the fewest arguments, and for each argument the one that leaves out the fewest
    others. Sizes are left to `make fit`.
    """
    fewest: dict[tuple[str, int | None], tuple[Launch, str]] = {}
    for launch, at in sorted(launches.items(), key=lambda x: len(absent(x[0]))):
        for i in absent(launch):
            fewest.setdefault((launch.name, i), (launch, at))
        fewest[launch.name, None] = launch, at
    parse(dict(fewest.values()).items())


@pytest.mark.parametrize("dtype", [FLOAT32, torch.float16], ids=str)
def test_every_kernel_takes_every_dtype(dtype: torch.dtype) -> None:
    """Of each kernel, the launch with the most arguments, and of gates of float64 beside float32."""
    found: dict[tuple[str, bool], tuple[Launch, str]] = {}
    for launch, at in recorded(every_call([dtype], [(64, 64)])).items():
        key = launch.name, "*fp64" in dict(launch.signature).values()
        if key not in found or len(absent(launch)) < len(absent(found[key][0])):
            found[key] = launch, at
    parse(found.values())


def test_every_kernel_compiles(launches: dict[Launch, str]) -> None:
    """The first launch of each, those of the smallest heads."""
    for launch in {launch.name: launch for launch in reversed(launches)}.values():
        assert launch.compile(90).metadata.shared <= HOPPER.shared_memory
