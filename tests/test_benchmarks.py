"""The benchmark's own logic, on a CPU: rows and targets, rendering, the peer's configurations, one tiny run."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import flacompose.ops
from benchmarks import (
    context,
    cuda,
    floor,
    generation,
    host,
    mamba,
    measure,
    model,
    models,
    peer,
    processes,
    public,
    report,
    run,
    summary,
    tuned,
    warm,
)
from benchmarks.cases import OPS, TRAINING, Shape
from benchmarks.processes import Figure
from benchmarks.report import Results, Row


def results() -> Results:
    rows = [
        Row("gla", "B8 T2048", "forward", "ms", 0.4, 0.8, max_ratio=0.6),
        Row("gla", "B8 T2048", "peak memory", "MiB", 900.0, 1000.0, max_ratio=0.6),
        Row("gla", "B64 T1", "decode, GPU", "us", 65.0, 215.0, max_value=70.0),
        Row("gla", "B8 T2048", "first step", "s", 3.2, None, max_value=10.0),
        Row("gla", "B1 T64", "forward, wall clock", "us", 50.0, 400.0),
        Row("gla", "B1 T1024", "relative error of o", "", None, 3e-3, max_ratio=1.0, note="ours failed"),
    ]
    environment = {"device": "NVIDIA H100", "torch": "2.13.0", "command": "python -m benchmarks.run"}
    return Results("fla", environment, rows, ["a note"])


def measured(asked: str, folder: Path) -> Results:
    """What a run saves that is started with these arguments."""
    run.main([*asked.split(), "--out", str(folder)])
    return Results.load(*report.saved(folder))


@pytest.mark.parametrize(
    ("ours", "other", "max_ratio", "max_value", "met"),
    [
        (1.0, 2.0, None, None, None),
        (1.0, 2.0, 0.5, None, True),
        (1.1, 2.0, 0.5, None, False),
        (1.0, None, 0.5, None, False),
        (None, 2.0, 0.5, None, False),
        (9.0, None, None, 10.0, True),
        (11.0, 100.0, None, 10.0, False),
        (1.0, 2.0, 0.5, 0.9, False),
        (float("nan"), 2.0, 0.5, None, False),
        (None, None, None, 10.0, False),
    ],
)
def test_targets(ours, other, max_ratio, max_value, met):
    assert Row("op", "case", "q", "ms", ours, other, max_ratio, max_value).met is met


def test_json_round_trip(tmp_path: Path):
    path = tmp_path / "new" / "gla.json"
    results().save(path)
    assert Results.load(path) == results()
    first = json.loads(path.read_text())["rows"][0]
    assert first["ratio"] == 0.5 and first["met"] is True
    assert list(path.parent.iterdir()) == [path]
    content = json.loads(path.read_text())
    for row in content["rows"]:
        del row["beside"]  # which earlier versions did not have
    path.write_text(json.dumps(content))
    assert Results.load(path) == results()


def test_table():
    lines = report.table(results()).splitlines()
    assert lines[:4] == [
        "- device: NVIDIA H100",
        "- torch: 2.13.0",
        "- command: `python -m benchmarks.run`",
        "- note: a note",
    ]
    assert lines[5] == "| shape | gla | flacompose | fla | ratio | target |  |"
    assert lines[7] == "| B8 T2048 | forward, ms | 0.4 | 0.8 | 0.5 | ratio ≤ 0.6 | met |"
    assert lines[8] == "| B8 T2048 | peak memory, MiB | 900 | 1000 | 0.9 | ratio ≤ 0.6 | short |"
    assert lines[9] == "| B64 T1 | decode, GPU, us | 65 | 215 | 0.302 | ≤ 70 us | met |"
    assert lines[10] == "| B8 T2048 | first step, s | 3.2 |  |  | ≤ 10 s | met |"
    assert lines[11] == "| B1 T64 | forward, wall clock, us | 50 | 400 | 0.125 |  |  |"
    error = "| B1 T1024 | relative error of o (ours failed) |  | 0.003 |  | ratio ≤ 1 | short |"
    assert lines[12] == error.replace("0.003", "3.00e-03")
    assert len(lines) == 13


def test_render_saved_results(tmp_path: Path, monkeypatch, capsys):
    results().save(tmp_path / "gla.json")
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "gla.json")])
    report.main()
    assert report.table(results()) in capsys.readouterr().out
    heading, folded = (tmp_path / "gla.md").read_text().split("\n\n", 1)
    assert heading == "## gla compared with flash-linear-attention, NVIDIA H100"
    assert folded.startswith('<details markdown="1">\n<summary>Figures</summary>\n\n')
    assert folded.endswith(f"\n\n{report.table(results())}\n</details>\n")


def test_labels():
    assert Shape(1, 2, 3, 4, 4).label == "B1 T2 H3 K=V=4" and str(Shape(1, 2, 3, 4, 4)) == "1x2x3x4x4"
    grouped = Shape(1, 2, 3, 4, 5, 2)
    assert grouped.label == "B1 T2 H3 HV6 K=4 V=5" and str(grouped) == "1x2x3x4x5x2"
    assert all(Shape.parse(str(shape)) == shape for shape in (grouped, Shape(1, 2, 3, 4, 4)))
    for text in ("8x2048x16x128", "1x2x3x4x5x6x7", "axbxcxdxe", ""):
        with pytest.raises(ValueError, match="BxTxHxKxV"):
            Shape.parse(text)


def test_relative_error():
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert measure.relative_error(truth.bfloat16(), truth) == 0
    assert measure.relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)


@pytest.fixture
def tuner(monkeypatch):
    """An autotuned kernel as Triton makes it, under heuristics, in a module of a package ``made_up``."""
    triton = pytest.importorskip("triton")
    autotuner = pytest.importorskip("triton.runtime.autotuner")

    def some_kernel():
        pass

    class Jitted:
        def __init__(self):
            self.fn = some_kernel
            self.calls = []

        def run(self, *args, **kwargs):
            self.calls.append(kwargs)

    configs = [triton.Config({"BK": b}, num_warps=w) for b in (32, 64) for w in (2, 4)]
    arguments = ["x", "BT", "K", "FLAG", "BK"]
    tuner = autotuner.Autotuner(Jitted(), arguments, configs, ["BT", "K", "FLAG"], None, None)
    module = types.ModuleType("made_up.kernels")
    vars(module).update(kernel=autotuner.Heuristics(tuner, arguments, {}), again=tuner, other=3)
    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    monkeypatch.setitem(sys.modules, "made_up.kernels", module)
    return tuner


KEY = (64, 128, True, "torch.bfloat16")


def write(path: Path, when: dict) -> Path:
    config = {"kwargs": {"BK": 64}, "num_warps": 2, "num_stages": 4}
    entry = {"when": when, "dtypes": ["bfloat16"], "config": config}
    lines = [
        {"device": "a GPU", "tuned_with": "a peer"},
        *({"kernel": name} | entry for name in ("some_kernel", "absent")),
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_installed_configurations_are_used(tuner, tmp_path: Path):
    path = write(tmp_path / "tuned.json", {"K": 128, "FLAG": True, "BT": 64})
    assert tuned.install(path, "made_up") == {("some_kernel", KEY)} == tuned.cached("made_up")
    assert tuned.origin(path) == "launch configurations in tuned.json were chosen by a peer on a GPU"
    # Triton itself finds the entry: a run that had to tune would call the kernel more than once.
    tuner.run(x=torch.empty(1, dtype=torch.bfloat16), BT=64, K=128, FLAG=True, grid=(1,), warmup=False)
    assert len(tuner.fn.calls) == 1
    launch = tuner.fn.calls[0]
    assert (launch["BK"], launch["num_warps"], launch["num_stages"]) == (64, 2, 4)
    tuner.cache = {}
    assert tuned.install(write(path, {"K": 128, "BT": 64}), "made_up") == set() and not tuner.cache


def test_saved_configurations_install_again(tuner, tmp_path: Path):
    path = tmp_path / "mine.json"
    tuner.cache = {KEY: tuner.configs[1], (64, "torch.bfloat16"): tuner.configs[0]}
    tuned.save(path, "a GPU", "0.6.0", "made_up")
    tuner.cache = {}
    assert tuned.install(path, "made_up") == {("some_kernel", KEY)}
    installed = tuner.cache[KEY]
    assert (installed.kwargs, installed.num_warps, installed.num_stages) == ({"BK": 32}, 4, 3)


def test_candidates_are_timed_for_a_shorter_time(tuner, monkeypatch):
    timed = []

    def do_bench(call, **options):
        timed.append(options)
        return [float(len(timed)), 0.0, 0.0]

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    tuned.shorten(20, "made_up")
    tuner.run(x=torch.empty(1), BT=64, K=128, FLAG=True, grid=(1,), warmup=False)
    assert timed == [{"warmup": 5, "rep": 20, "quantiles": (0.5, 0.2, 0.8)}] * 4
    assert tuner.best_config is tuner.configs[0]


def test_workers_share_the_candidates(tuner):
    compiled = []
    for index in range(3):
        warm.compile_only(tuner, index, 3)
        for _ in range(2):  # the second call finds a kernel that the first will have tuned
            tuner.run(
                x=torch.empty(1, dtype=torch.bfloat16), BT=64, K=128, FLAG=True, grid=(1,), warmup=False
            )
        assert tuner.best_config is tuner.configs[0]
    for call in tuner.fn.calls:
        assert call["warmup"] is True  # compiled, not launched
        compiled.append((call["BK"], call["num_warps"]))
    assert sorted(compiled) == [(32, 2), (32, 4), (64, 2), (64, 4)]


def test_a_worker_makes_the_calls(on_cpu, monkeypatch):
    """Those that are timed, none of which is of the whole length."""
    lengths: list[tuple[str, int]] = []

    def counted(name: str):
        return lambda q, **given: (
            lengths.append((name, q.shape[1])) or getattr(flacompose.ops, name)(q, **given)
        )

    names = ("chunk_kda", "fused_recurrent_kda")
    monkeypatch.setattr(
        peer, "load", lambda: types.SimpleNamespace(**{name: counted(name) for name in names})
    )
    monkeypatch.setattr(sys, "argv", ["warm", "kda", "1x4096x1x4x4,1x8192x1x4x4", "none", "0", "1"])
    warm.main()
    assert lengths == [("chunk_kda", 256), ("chunk_kda", 256), ("fused_recurrent_kda", 1)]


@pytest.fixture
def on_cpu(monkeypatch):
    """The GPU's cases at a tiny size on the CPU: everything is called, each figure is 1."""

    def once(fn, *_):
        fn()
        return 1.0

    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    for name in ("ACCURACY", "DECODE_GPU", "DECODE_HOST"):
        T = 1 if name.startswith("DECODE") else 5
        monkeypatch.setattr(cuda, name, Shape(2, T, 2, 8, 4))
    for name in ("peak_mib", "wall_us", "host_us"):
        monkeypatch.setattr(measure, name, once)
    for name in ("gpu_ms", "call_ms"):
        monkeypatch.setattr(measure, name, lambda fns: [once(fn) for fn in fns])
    monkeypatch.setattr(measure, "graph", lambda calls: lambda: [call() for call in calls])


SHAPE = Shape(2, 5, 2, 8, 4)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_gpu_cases(op, on_cpu):
    """Both sides get the same inputs, truth is float64 on what bfloat16 made of them, and a side may fail alone."""
    sides = {"flacompose": flacompose.ops, "fla": flacompose.ops}
    notes: list[str] = []
    times = list(cuda.training(op, sides, SHAPE, notes))
    assert [row.quantity for row in times] == ["forward", "forward + backward", "peak memory over the inputs"]
    draws = op.draw(SHAPE, torch.bfloat16, "cpu", grad=True)
    for name, x in draws.items():
        assert x.dtype == (op.inputs[name].dtype or torch.bfloat16)
    rows = [*times, *cuda.decode(op, sides), *cuda.accuracy(op, sides)]
    assert not notes and not any(row.note for row in rows)
    assert all(row.ours is not None and row.ours == row.other for row in rows)
    errors = [row for row in rows if row.quantity.startswith("relative error")]
    # Inputs rounded to bfloat16 are the truth's inputs too, so only the arithmetic differs.
    assert len(errors) == 1 + len(op.inputs) + len(op.states) * (1 + op.state_gradients)
    for row in errors:
        exact = row.quantity.endswith("final_m")  # the largest of several keys
        assert "initial" in row.quantity or (0 < row.ours < 2e-2 or exact and row.ours == 0)

    def fails(*_, **__):
        raise ValueError("no such kernel\nand more")

    sides["fla"] = types.SimpleNamespace(**{op.chunk: fails, op.recurrent: fails})
    for row in (*cuda.training(op, sides, SHAPE, []), *cuda.accuracy(op, sides)):
        assert row.ours is not None and row.other is None and row.met is not True
        assert row.note == "fla failed: ValueError: no such kernel"


def test_gpu_run(on_cpu, monkeypatch, tmp_path: Path):
    """All of an op stands in one table, and the configurations that the peer has chosen beside it."""
    monkeypatch.setattr(peer, "load", lambda: flacompose.ops)
    monkeypatch.setattr(peer, "version", lambda: "0")
    monkeypatch.setattr(run, "environment", lambda *_: {"device": "none"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "first_step_s", lambda name, side, *_: 2.0 if side == "fla" else 1.0)
    asked = f"--ops gla --parts training decode accuracy cold --shapes {SHAPE}"
    for cold_peer, ratio in (("", None), (" --cold-peer", 0.5)):
        saved = measured(asked + cold_peer, tmp_path)
        assert len(saved.rows) == 14 and all(row.ours is not None and not row.note for row in saved.rows)
        assert (saved.rows[-1].ratio, saved.rows[-1].met) == (ratio, True)
        assert saved.notes == ["0 launch configurations tuned by the peer in this run"]
    assert (tmp_path / "peer-configs.json").exists()


MAMBA = Shape(2, 70, 2, 8, 4, group=3)


def siso(ADT, DT, Trap, **inputs):
    """mamba-ssm's scan of Mamba-3, by flacompose's: heads before tokens in three inputs."""
    return flacompose.ops.mamba3_siso_combined(**inputs, ADT=ADT.mT, DT=DT.mT, Trap=Trap.mT)


def xlstm(autocast_kernel_dtype, **inputs):
    """mlstm_kernels' function, by flacompose's: heads before tokens in all tensors."""
    by_tokens = {name: x.transpose(1, 2) for name, x in inputs.items()}
    return flacompose.ops.chunk_mlstm(**by_tokens)[0].transpose(1, 2)


@pytest.mark.parametrize("name", mamba.PARTS)
def test_mamba_run(name, on_cpu, monkeypatch, tmp_path: Path):
    """Before anything is timed, the sides are compared; then what surrounds a scan is under the compiler."""
    part, compiled = mamba.PARTS[name], []
    monkeypatch.setitem(mamba.PARTS, name, part := part._replace(accuracy=MAMBA))
    ours = {"mamba3_siso_combined": siso, "mlstm_chunkwise__xl_chunk": xlstm}
    module = types.SimpleNamespace(**vars(flacompose.ops) | ours)
    monkeypatch.setattr(mamba, "load", lambda name: module)
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compiled.append(options) or fn)
    monkeypatch.setattr(run, "environment", lambda *_: {"device": "none"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    saved = measured(f"--parts {name} --shapes {MAMBA} --tune-ms 9", tmp_path)
    assert saved.notes == [part.note, run.TUNING.format(9)] and part.side in saved.environment
    ops = part.ops if part.slow_to_compile else (*part.ops, part.compiled)
    assert compiled == [{"fullgraph": True, "dynamic": False}] * (not part.slow_to_compile)
    for op in ops:
        differs, *rows = [row for row in saved.rows if row.op == op.name]
        assert differs.ours < 1e-7 and differs.max_value == mamba.TOLERANCE and differs.met
        costs = [row for row in rows if "error" not in row.quantity]
        assert [row.ratio for row in costs] == [1] * (5 if part.slow_to_compile else 3)
        # The other side gets transposed copies, of which float32 sums are taken in another order.
        errors = rows[len(costs) :]
        assert all(row.ours == pytest.approx(row.other, rel=1e-3) and row.ours < 2e-2 for row in errors)
        assert bool(errors) == (op in part.ops and not part.slow_to_compile)


def test_sides_that_differ_or_fail(on_cpu):
    def other(x, **inputs):
        return flacompose.ops.mamba_chunk_scan_combined(x, **{**inputs, "A": inputs["A"] * 1.5})

    def fails(*_, **__):
        raise ValueError("no such kernel")

    def row(scan) -> Row:
        side = types.SimpleNamespace(mamba_chunk_scan_combined=scan)
        part = mamba.PARTS["mamba2"]
        return mamba.difference(part.ops[0], part.sides(flacompose.ops, side), MAMBA)

    assert row(other).quantity.endswith(", in dA") and row(other).met is False
    failed = row(fails)
    assert failed.met is False and failed.note == "mamba-ssm failed: ValueError: no such kernel"


def test_weak_gates_differ_from_head_to_head():
    """The first head forgets hardly anything in a thousand tokens, the last about as much as other inputs have it."""
    _, weak = mamba.PARTS["flashqla"].ops
    g = weak.draw(Shape(1, 1000, 2, 8, 4, group=2), torch.bfloat16, "cpu")["g"]
    assert g.dtype == torch.float32 and (g <= 0).all()
    first, *_, last = g.sum(1).flatten().tolist()
    assert -0.1 < first < 0 and last < -100


def rwkv4_of_the_peer(w, u, k, v, state):
    """The peer's function, by flacompose's: it takes the logarithm of a rate, and three tensors of a state in one."""
    o, end = flacompose.ops.chunk_rwkv4(-w.exp(), u, k, v, tuple(state.squeeze(2).unbind(1)), True)
    return o, torch.stack(end, 1).unsqueeze(2)


@pytest.mark.parametrize("name", ["rwkv4", "rg_lru"])
@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_what_the_peer_has_in_another_form(name: str, form: str):
    # What has two forms has only this one, so that the other cannot take its place.
    names = [f"{form}_{name}" for form in ("chunk", "fused_recurrent") for name in ("hgrn", "kda")]
    functions = dict.fromkeys(names, pytest.fail)
    functions[f"{form}_hgrn"] = getattr(flacompose.ops, f"{form}_hgrn")
    fla = peer.adapted(functions | {"fused_recurrent_rwkv4": rwkv4_of_the_peer})
    op = OPS[name]
    inputs = op.draw(Shape(2, 9, 2, 8, 4), torch.float32, "cpu")
    if name == "rwkv4":
        inputs["k"] -= 20  # all below a maximum of 0, which is none of theirs
    for states in ({}, {"initial_state": op.packed([*op.draw_states(Shape(2, 9, 2, 8, 4), "cpu").values()])}):
        (o, end), (expected, expected_end) = (
            getattr(op, f"{form.split('_')[-1]}_of")(module)(**inputs, **states, output_final_state=True)
            for module in (fla, flacompose.ops)
        )
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(op.unpacked(end), op.unpacked(expected_end))


def test_the_peer_is_told_of_strong_gates():
    names = [f"{form}_{name}" for form in ("chunk", "fused_recurrent") for name in ("hgrn", "kda")]
    fla = peer.adapted({name: lambda **given: given for name in (*names, "fused_recurrent_rwkv4")})
    op = OPS["kda_strong_gates"]
    assert op.chunk_of(fla)(q=1) == {"q": 1, "safe_gate": True}
    assert op.recurrent_of(fla)(q=1) == {"q": 1}
    assert op.chunk_of(flacompose.ops).func is flacompose.ops.chunk_kda


@pytest.mark.parametrize("name", ["selective_scan", "rwkv4"])  # results: an output alone, and one of two
def test_an_op_that_the_peer_lacks(name: str, on_cpu, monkeypatch):
    """It stands beside the traffic of its inputs and results, a gradient of each input among these."""
    monkeypatch.setattr(measure, "gpu_ms", lambda fns: [float(len(fn())) for fn in fns])
    op = OPS[name]
    rows = list(cuda.beside_floor(op, {"flacompose": flacompose.ops}, SHAPE, []))
    assert all(row.beside == "floor" and row.ratio == 1 and row.met is None and not row.note for row in rows)
    assert rows[1].ours == len(op.inputs)
    inputs = op.draw(SHAPE, torch.float32, "cpu", grad=True)
    o, _ = op.chunk_of(floor.of(op))(**inputs)
    assert o.shape == inputs[op.output].shape
    for x, dx in zip(inputs.values(), torch.autograd.grad(o.sum(), list(inputs.values())), strict=True):
        assert dx.shape == x.shape


def test_the_hopper_check_is_lifted_once_refused(monkeypatch):
    module = types.ModuleType("fla.ops.common.chunk_o")
    vars(module)["TRITON_ABOVE_3_7_1"] = False
    for name in ("fla", "fla.ops", "fla.ops.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def step():
        if not vars(module)["TRITON_ABOVE_3_7_1"]:
            raise RuntimeError("Triton >= 3.4.0 on Hopper GPUs produces incorrect results for gated ...")

    note = peer.first_call(step)
    assert note is not None and "lifted" in note
    assert peer.first_call(step) is None
    with pytest.raises(RuntimeError, match="other"):
        peer.first_call(lambda: (_ for _ in ()).throw(RuntimeError("other")))


def test_a_call_is_timed_with_its_host():
    once, twice = measure.call_ms([lambda: time.sleep(0.01), lambda: time.sleep(0.02)], rounds=1, runs=3)
    assert 10 <= once < twice


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_measures():
    x = torch.randn(2**20, device="cuda")
    assert measure.peak_mib(lambda: x + 1) == pytest.approx(4)
    replay = measure.graph([lambda: x.add_(1), lambda: x.add_(1)])
    before = x.clone()
    replay()
    torch.testing.assert_close(x, before + 2)
    assert 0 < measure.gpu_ms([replay, lambda: x.sum()], rounds=1, runs=5)[0] < 5
    assert measure.host_us(lambda: x + 1, calls=5, rounds=1) > 0
    assert measure.wall_us(lambda: x + 1, calls=5, rounds=1) > 0


def test_another_checkout_is_what_a_process_imports(tmp_path: Path):
    package = tmp_path / "flacompose"
    package.mkdir()
    (package / "__init__.py").write_text("print('words')\nprint('{\"imported\": true}', flush=True)\n")
    with contextlib.closing(processes.Process(processes.command("report", ["--help"], tmp_path))) as process:
        assert process.receive(60) == {"imported": True}
        assert process.receive(60) is None


def test_a_process_that_fails_or_is_late():
    fails = "print(1)\nraise ValueError('no such mixer')"
    with contextlib.closing(processes.Process([sys.executable, "-c", fails])) as process:
        with pytest.raises(RuntimeError, match="^ValueError: no such mixer$"):
            process.receive(60)
    with contextlib.closing(processes.Process([sys.executable, "-c", "input()"])) as process:
        with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
            process.receive(0.2)


def test_empty_caches():
    with processes.empty_caches() as env:
        folders = {Path(env[name]).parent for name in processes.CACHES}
        (folder,) = folders
        assert folder.is_dir() and not any(folder.iterdir())
    assert not folder.exists()


def answers(capsys) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_host_process(monkeypatch, capsys):
    names = [host.SDPA, "gla", "gsa", "gla"]
    requests = [{"op": name, "shape": "1x4x2x8x8", "calls": 0.0} for name in names]
    requests.append({"op": "gla", "shape": "four", "calls": 0.0})
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(x) + "\n" for x in requests)))
    host.serve("flacompose", "cpu")
    *good, bad = answers(capsys)
    assert len(good) == len(names)
    for reply in good:
        assert list(reply["us"]) == list(host.CALLS) and all(us > 0 for us in reply["us"].values())
    assert bad["error"].startswith("ValueError: a shape is")


class FakeHost:
    """A process of the host part that answers at once; `us` has what it takes by side, later rounds take more."""

    us = {"flacompose": 60.0, "before": 100.0, host.SDPA: 30.0}
    log: list[tuple[str, float]] = []

    def __init__(self, command: list[str]) -> None:
        self.side = command[command.index("benchmarks.host") + 1]
        self.asked: list[str] = []

    def send(self, request: dict[str, Any]) -> None:
        side = host.SDPA if request["op"] == host.SDPA else self.side
        self.log.append((side, request["calls"]))
        self.asked.append(side)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        side = self.asked.pop(0)
        rounds = sum(entry == (side, 1.0) for entry in self.log)
        return {"us": dict.fromkeys(host.CALLS, self.us[side] * max(1, rounds))}

    def close(self) -> None:
        pass


def test_host_rows(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(host, "Process", FakeHost)
    monkeypatch.setattr(FakeHost, "log", [])
    rows = list(host.take([OPS["hgrn"]], "cpu", Shape(1, 4, 2, 8, 8), tmp_path, rounds=3))
    # Every side compiles before any is timed, then they take turns.
    sides = ["flacompose", "before", host.SDPA]
    assert FakeHost.log == [(side, 0.0) for side in sides] + [(side, 1.0) for side in sides] * 3
    assert [(row.beside, row.ours, row.other) for row in rows] == [
        ("before", 120, 200),
        (host.SDPA, 120, 60),
    ] * 3
    limits = [(row.quantity, row.beside) for row in rows if row.max_ratio is not None]
    assert limits == [("forward + backward, host", host.SDPA)] and rows[3].met
    assert [row.case for row in rows] == ["B1 T4 D=16"] * 4 + ["B1 T1 D=16"] * 2


def test_model_process(monkeypatch, capsys):
    monkeypatch.setattr(measure, "wall_us", lambda fn, **_: fn() or 1e3)
    arguments = ["softmax", "--device", "cpu", "--backend", "eager", "--layers", "1", "--width", "64"]
    arguments += ["--vocabulary", "50", "--model-shapes", "2x16", "1x32", "--quantities", *model.QUANTITIES]
    monkeypatch.setattr(sys, "argv", ["model", *arguments])
    model.main()
    size, *given = answers(capsys)
    assert size == {"note": "0.1 million parameters"}  # 4 * 64^2, 3 * 64 * 256, 2 * 50 * 64, and three norms
    assert [(x["case"], x["quantity"], x["unit"]) for x in given] == [
        ("B2 T16", "first step, cold caches", "s"),
        ("B2 T16", "step", "ms"),
        ("B1 T32", "first step at a second shape", "s"),
        ("B1 T32", "step", "ms"),
    ]


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.filterwarnings("ignore:queries and keys of num_heads")  # of large models, in a small one
def test_models_differ_in_what_mixes_tokens(name: str):
    net = models.build(name, layers=2, width=64, vocabulary=50)
    tokens = torch.randint(50, (1, 6))
    logits, _ = net(tokens)
    assert logits.shape == (1, 6, 50)
    torch.testing.assert_close(net(tokens[:, :3])[0], logits[:, :3])  # none looks ahead
    assert isinstance(net.layers[1].attn, models.SoftmaxAttention) == (name == models.SOFTMAX)


def test_model_run(monkeypatch, tmp_path: Path):
    """Every model in a process with empty caches, and another checkout's beside it."""

    def figures(command, model, side, timeout_s, env):
        assert all(name in env for name in processes.CACHES)
        yield Figure(model, side, "B1 T2", "first step, cold caches", "s", 2.0 if model == "softmax" else 5.0)

    monkeypatch.setattr(model, "figures", figures)
    asked = f"--parts model --device cpu --models softmax gla --before {tmp_path}"
    saved = measured(asked, tmp_path)
    assert [(row.op, row.beside, row.ours, row.other, row.met) for row in saved.rows] == [
        ("softmax model", "softmax", None, 2.0, None),
        ("gla model", "softmax", 5.0, 2.0, False),
        ("gla model", "before", 5.0, 5.0, None),
    ]


def test_public_run(tmp_path: Path):
    """Tiny models in processes of their own: this library's computes what transformers' does, in one graph."""
    pytest.importorskip("transformers")
    asked = "--parts public --device cpu --small --backend eager --public-models qwen3-next"
    saved = measured(f"{asked} --sides flacompose python", tmp_path)
    assert not [note for note in saved.notes if "failed" in note]
    beside_python = {row.quantity: row for row in saved.rows if row.beside == "python"}
    of_tokens = {"graph breaks of a token", "one token, compiled", "one token, eager"}
    joined = {f"{quantity}{public.JOINED}" for quantity in of_tokens}
    assert set(beside_python) == {"loss", "prefill", "training step, eager"} | of_tokens | joined
    assert all(
        beside_python[x].other == beside_python[x.removesuffix(public.JOINED)].other is not None
        for x in joined
    )
    assert abs(beside_python["loss"].ours - beside_python["loss"].other) < 0.02 * beside_python["loss"].other
    alone = {row.quantity: row for row in saved.rows if row.beside == "fla"}
    assert alone["graph breaks of a training step"].ours == alone["graph breaks of a token"].ours == 0
    assert alone["training step, compiled"].met is False  # without a figure of the peer


def test_context_run(tmp_path: Path):
    """A tiny model, whole and on two ranks, has the same loss and gradients."""
    asked = "--parts context --device cpu --context-models gla --tokens 150 70 --rounds 1"
    saved = measured(f"{asked} --layers 2 --width 64 --vocabulary 50", tmp_path)
    assert not [note for note in saved.notes if "failed" in note]
    rows = {(row.case, row.quantity): row for row in saved.rows}
    assert {case for case, _ in rows} == {"B1 T150", "B1 T70"} and saved.environment["ranks"] == "2"
    for case in ("B1 T150", "B1 T70"):
        for quantity, bound in (("loss", 1e-3), ("norm of the gradients", 1e-2), (context.STEP, torch.inf)):
            assert abs(rows[case, quantity].ratio - 1) < bound


def test_context_rows():
    """Long rows have limits, unless one GPU cannot hold them."""
    taken = {"several": {2048: 6.0, 1 << 17: 60.0, 1 << 20: 9.0}, "one GPU": {2048: 10.0, 1 << 17: 100.0}}
    figures = [
        Figure("gla", side, f"B1 T{T}", context.STEP, "ms", value)
        for side, values in taken.items()
        for T, value in values.items()
    ]
    rows = context.rows(figures, ranks=2)
    assert [(row.ours, row.other, row.max_ratio, row.met) for row in rows] == [
        (6.0, 10.0, None, None), (60.0, 100.0, 0.588, False), (9.0, None, None, None),
    ]  # fmt: skip
    run_of = Results(context.ONE, {"device": "NVIDIA H100", "ranks": "2", "commit": "0123456789"}, rows)
    table = summary.all_figures(summary.collect([run_of]))
    assert "| gla model | 131,072 | 100 | 60 | 0.833 | 2 H100 | 0123456 |" in table
    assert "| gla model | 1,048,576 | does not fit | 9 |  | 2 H100 | 0123456 |" in table


def test_public_rows():
    def figure(side: str, case: str, quantity: str, value: float) -> Figure:
        return Figure("qwen3-next", side, case, quantity, "ms", value)

    figures = [
        figure("flacompose", "B1 T1", public.TOKEN, 1.0), figure("fla", "B1 T1", public.TOKEN, 2.0),
        figure("flacompose", "B64 T1", public.TOKEN, 1.0), figure("fla", "B64 T1", public.TOKEN, 2.0),
        figure("flacompose", "B4 T8", public.STEP, 1.0), figure("fla", "B4 T8", public.STEP, 1.25),
        figure("python", "B4 T8", public.STEP, 4.0),
    ]  # fmt: skip
    rows = {(row.beside, row.case): (row.ratio, row.met) for row in public.rows(figures)}
    assert rows == {
        ("fla", "B1 T1"): (0.5, False), ("fla", "B64 T1"): (0.5, None), ("fla", "B4 T8"): (0.8, True),
        ("python", "B4 T8"): (0.25, None),
    }  # fmt: skip


def test_generation_run(monkeypatch, tmp_path: Path):
    """A tiny model in a process of its own."""
    asked = ["eager", "CUDA graph"]
    monkeypatch.setattr(generation, "DEFAULT_MODES", asked)
    saved = measured("--parts generation --device cpu --small", tmp_path)
    eager, graph = saved.notes
    assert "failed" not in eager and graph == "gla, CUDA graph: needs a GPU"
    assert all(row.op == "gla model" and row.ours is not None and row.ours > 0 for row in saved.rows)
    names = ("one token, eager", "prompt, eager", "tokens per second, eager", f"{generation.CHECK}, eager")
    assert {row.quantity for row in saved.rows} == {*names}
    assert {row.beside for row in saved.rows} == {"", generation.STEPS, generation.AGAIN}


def test_generation_rows():
    def figure(B: int, quantity: str, value: float) -> Figure:
        return Figure("gla", "flacompose", f"B{B} T1", quantity, "ms", value)

    figures = [
        figure(64, "one token, eager", 10.0), figure(64, "kernels of one token, eager", 240.0),
        figure(64, "one token, CUDA graph", 1.0), figure(1, "one token, CUDA graph", 0.25),
    ]  # fmt: skip
    rows = {(row.case, row.quantity): row for row in generation.rows(figures)}
    graph = rows["B64 T1", "one token, CUDA graph"]
    assert (graph.ratio, graph.max_value, graph.met) == (0.1, 0.8, False)
    assert rows["B1 T1", "one token, CUDA graph"].met
    assert rows["B64 T1", "tokens per second, CUDA graph"].ours == 64_000
    assert rows["B64 T1", "kernels of one token, for each of 12 layers, eager"].ours == 20


@pytest.fixture
def recurrent_model():
    model = generation.build(generation.SMALL, "cpu", torch.float32)
    for x in model.parameters():
        if x.ndim == 2:  # so that the likeliest token depends on those before it
            torch.nn.init.normal_(x, std=0.3)
    return model


class FakeDecoder:
    """A decoder that compiles nothing."""

    def __init__(self, model, tokens, state) -> None:
        self.model, self.state = model, state

    def __call__(self, tokens):
        outputs, self.state = self.model(tokens, self.state)
        return outputs


@torch.no_grad()
def test_every_mode_decodes_the_same(recurrent_model, monkeypatch):
    monkeypatch.setattr(generation, "Decoder", FakeDecoder)
    start = torch.tensor([[3], [7]])
    expected = recurrent_model.generate(start, 6)
    for mode in generation.MODES:
        token, compiled = start.clone(), generation.compiler(mode, "eager")
        one = generation.decoding(recurrent_model, token, mode, compiled)
        said = []
        for _ in range(6):
            one()
            said.append(token.clone())
        assert torch.equal(torch.cat(said, 1), expected[:, -6:]), mode
    assert expected.unique().numel() > 2


@torch.no_grad()
def test_tokens_are_checked(recurrent_model, monkeypatch):
    """Both ways find how many tokens are right, and the one with all states the state after them."""
    start = torch.tensor([[3], [7]])
    tokens = torch.cat(
        [start, recurrent_model.generate(start, generation.CHECKED - 1)[:, 1 - generation.CHECKED :]], 1
    )
    tokens[1, 4] = (tokens[1, 4] + 1) % 50
    right, state = generation.check(recurrent_model, tokens, recurrent_model.init_state(2))
    assert right.tolist() == [generation.CHECKED - 1, 3]
    _, expected = recurrent_model(tokens[1:, :4])
    torch.testing.assert_close(state[0].recurrent[1:], expected[0].recurrent, atol=1e-4, rtol=1e-4)
    again, state = generation.check_again(recurrent_model, tokens, recurrent_model.init_state(2))
    assert again.tolist() == right.tolist()
    torch.testing.assert_close(state[0].recurrent[1:], expected[0].recurrent, atol=1e-4, rtol=1e-4)


CASE = TRAINING[0].label
"""The one that the pages quote of each op."""


def summarised() -> list[Results]:
    """A run, a later one of the same op that failed in part, and one of models."""
    case = CASE
    ops = [
        Row("gla", case, "forward + backward", "ms", 2.0, 4.0),
        Row("gla", "B1 T9", "forward + backward", "ms", 7.0, 7.0),
        Row("gla", case, "peak memory over the inputs", "MiB", 300.0, 1000.0),
        Row("gla", case, "first step, cold caches", "s", 3.5, None),
        Row("simple_gla", case, "forward + backward", "ms", 1.0, None, note="fla failed"),
    ]
    later = [
        Row("gla", case, "forward + backward", "ms", 1.0, 4.0),
        Row("gla", case, "peak memory over the inputs", "MiB", 200.0, None),
        Row("gla", case, "first step, cold caches", "s", 2.5, None),
    ]
    rows = [
        Row("gla model", case, "step", "ms", 48.0, 40.0, beside="softmax"),
        Row("gla model", case, "step", "ms", 48.0, 96.0, beside="before"),
        Row("gla model", case, "first step, cold caches", "s", 26.0, 20.0, beside="softmax"),
        Row("gla model", "B1 T1", "one token, eager", "ms", 9.0, 9.0, beside="softmax"),
        Row("gla model", "B1 T1", "one token, CUDA graph", "ms", 1.5, 1.2, beside="softmax"),
    ]
    return [
        Results("fla", {"device": "new", "date": "2026-02-01"}, later),
        Results("fla", {"device": "old", "date": "2026-01-01"}, ops),
        Results("softmax attention", {"device": "H200", "date": "2026-01-02"}, rows),
    ]


def test_summary_has_the_newest_figures():
    figures = summary.collect(summarised())
    # A later figure that lacks the other side replaces none that has it.
    assert figures["gla", "fla", CASE, summary.MEMORY][0].ours == 300
    lines = summary.all_figures(figures).splitlines()
    # No run has a commit, and none has the memory of both sides beside its step: these columns are left out.
    assert "| op | compared with | step, ms | theirs, ms | ratio | GPU |" in lines
    assert "| gla | flash-linear-attention | 1 | 4 | 0.25 | new |" in lines
    assert "| gla model | softmax attention | 48 | 40 | 1.2 | H200 |" in lines
    # But it replaces one that lacks it too.
    assert "| gla | 2.5 | new |" in lines and "| gla model | 26 | 20 | H200 |" in lines
    assert not any("simple_gla" in line for line in lines)
    with pytest.raises(LookupError, match=r"'forward \+ backward' of 'gsa' beside 'fla'"):
        summary.the(figures, "gsa", "fla", summary.STEP)


def test_summary_of_other_sides():
    """FlashQLA has a row for each shape, an op that no library has one beside its traffic."""
    step = functools.partial(Row, quantity=summary.STEP, unit="ms", ours=2.0, other=1.0)
    qla = Results("FlashQLA", {}, [step("gated_delta_rule", case) for case in (CASE, "B1 T9")])
    lines = summary.all_figures(
        summary.collect([qla, Results("fla", {}, [step("rg_lru", "B8 T2048 D=2048", beside="floor")])])
    ).splitlines()
    for op, beside in (
        (f"gated_delta_rule, {CASE}", "FlashQLA"),
        ("gated_delta_rule, B1 T9", "FlashQLA"),
        ("rg_lru", "reading and writing alone"),
    ):
        assert f"| {op} | {beside} | 2 | 1 | 2 | unknown |" in lines


def test_flashqla_is_beside_the_gated_delta_rule():
    """On the GPU alone, and with the host's time of single calls."""
    run = [
        Row("gated_delta_rule", case, quantity + kind, "ms", ratio - less, 1.0)
        for case, step in ((CASE, 1.4), ("B1 T9", 1.6))
        for kind, less in (("", 0), (", with the host", 0.8))
        for quantity, ratio in ((summary.FORWARD, 1.25), (summary.STEP, step))
    ]
    device = {"device": "NVIDIA H200", "commit": "0123456789", "FlashQLA": "0.1"}
    figures = summary.collect([Results("FlashQLA", device, run)])
    told = " ".join(summary.faster(figures).split())
    assert "**1.40 to 1.60 times as long**" in told and "1.25 to 1.25 times (H200, commit 0123456)" in told
    assert "in single calls in eager mode, a step takes 0.60 to 0.80 times as long" in told
    assert "| strong | B1 T9 | 1.25 | 1.60 | 0.45 | 0.80 |" in summary.beside_flashqla(figures)


def test_summary_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    qla = Results("FlashQLA", {}, [Row("gated_delta_rule", CASE, summary.STEP, "ms", 1.5, 1.0)])
    pictures = []
    for _ in range(2):
        summary.plot(summary.collect([*summarised(), qla]), tmp_path / "summary.svg")
        pictures.append((tmp_path / "summary.svg").read_text())
    assert pictures[0] == pictures[1]  # no dates, no random names
    assert all(text in pictures[0] for text in ("<svg", "beside FlashQLA", "1.50", "0.25"))


@pytest.mark.parametrize("name", ["summary", "context", "state_tracking"])
def test_pictures_are_legible_on_white_and_on_dark_pages(name: str):
    """Their ground is transparent, text has a colour, and each colour has a contrast of at least 3 to both pages."""

    def light(colour: str) -> float:
        levels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in levels]
        return sum(share * x for share, x in zip((0.2126, 0.7152, 0.0722), linear)) + 0.05

    picture = (report.RESULTS.parents[1] / f"docs/images/{name}.svg").read_text()
    assert all("fill: #" in style for style in re.findall(r'<text style="([^"]*)"', picture))
    colours = set(re.findall("#[0-9a-f]{6}", picture))
    assert colours and all(light("#ffffff") / light(colour) >= 3 for colour in colours), colours
    assert all(light(colour) / light("#1e2129") >= 3 for colour in colours), colours


def test_the_shipped_results_have_a_summary():
    figures = summary.collect([Results.load(path) for path in report.saved(report.RESULTS)])
    absent = {"mlstm", "selective_scan"}  # which flash-linear-attention does not have
    beside_fla = [name for name in OPS if name not in absent]
    assert list(summary.ops(figures, "fla", summary.STEP)) == beside_fla


@pytest.mark.parametrize(
    "asked",
    ["--device cpu", "--ops no_such_op", "--parts host decode --device cpu", "--parts mamba2 --device cpu"],
)
def test_refused_arguments(asked: str, monkeypatch, capsys):
    for name in ("apart", "on_cuda"):
        monkeypatch.setattr(run, name, lambda *_: None)
    with pytest.raises(SystemExit):
        run.main(asked.split())
    assert "error:" in capsys.readouterr().err
