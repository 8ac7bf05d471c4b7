"""examples/train_lm.py as a user runs it, small: train, interrupt, continue, export, reload, sample."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flacompose.layers import RecurrentState  # registers the operators too, for torch.load

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_lm.py"
TEXT = b"".join(b"%d times %d is %d.\n" % (a, b, a * b) for a in range(40) for b in range(20))
TINY = "--width 16 --depth 1 --heads 2 --batch 2 --segment 32 --steps 150 --lr 0.02 --sample 20".split()


def command(out: Path, text: Path, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--out", str(out), "--text", str(text), *TINY, *options]


def environment() -> dict[str, str]:
    """One thread, so that sums have one order, and this checkout rather than one that is installed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    caches = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}  # of this process, which the example would use
    inherited = {name: value for name, value in os.environ.items() if name not in caches}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def run(out: Path, text: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(out, text, *options),
        env=environment() | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(TEXT)
    return path


def interrupted(out: Path, text: Path, sign: str, **variables: str) -> tuple[str, str]:
    """What a run said that got a Ctrl-C as soon as `sign` was on its standard error."""
    process = subprocess.Popen(
        command(out, text),
        env=environment() | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    progress = ""
    assert process.stderr is not None
    while sign not in progress:
        character = process.stderr.read(1)
        assert character, f"ended before {sign}: {progress}"
        progress += character
    process.send_signal(signal.SIGINT)
    said, complaint = process.communicate(timeout=200)
    complaint = progress + complaint
    assert process.returncode == 130, complaint
    assert "interrupted at step" in said
    assert "Traceback" not in complaint
    assert {path.name for path in out.iterdir()} == {"checkpoint.pt", "compiler-cache"}
    assert f"rm -r {out} removes everything" in said
    return said, complaint


def exported(out: Path) -> dict[str, torch.Tensor]:
    return torch.export.load(out / "lm.pt2").state_dict


def losses(said: str) -> tuple[float, float]:
    """Nats per held-out byte of byte frequencies and of the model."""
    (baseline,) = (line.split()[-2] for line in said.splitlines() if "predicting byte frequencies" in line)
    (model,) = (line.split()[-2] for line in said.splitlines() if "this model" in line)
    return float(baseline), float(model)


def check_whole_run(out: Path, result: subprocess.CompletedProcess[str]) -> None:
    """Of a run from start to end. It leaves no file of the compiler's anywhere."""
    assert result.returncode == 0, result.stderr
    for slow in ("compiling the first step", "exporting and loading", "sampling"):
        assert re.search(rf"{slow}: \d\d:\d\d", result.stderr), slow
    baseline, model = losses(result.stdout)
    assert model < baseline
    assert {path.name for path in out.iterdir()} == {"loss.png", "lm.pt2", "lm_step.pt2"}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    for length in (3, 64, 65, 165, 1000):
        assert f"length {length:>5}: largest relative error" in result.stdout
    assert "The value of " in result.stdout
    assert f"removed {out / 'checkpoint.pt'} and the compiler's cache" in result.stdout
    assert f"left lm.pt2, lm_step.pt2, loss.png in {out}; rm -r {out} removes them" in result.stdout


def test_clean_removes_what_the_demo_leaves(tmp_path: Path, main: Callable) -> None:
    out = main.__globals__["parse_args"]([]).out
    for left in (out, Path(".venv"), Path("examples/__pycache__")):
        (tmp_path / left).mkdir(parents=True)
    subprocess.run(
        ["make", "--silent", "--file", str(ROOT / "Makefile"), "clean"],
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["examples"]


def check_export(out: Path) -> None:
    """Where the example was not imported, one call over a text equals two, and one for each token, with its state."""
    read, step = (torch.export.load(out / name).module() for name in ("lm.pt2", "lm_step.pt2"))
    weights = dict(read.named_buffers()) | dict(read.named_parameters())
    device = next(iter(weights.values())).device
    tokens = torch.arange(100, device=device)[None] % 256
    # width 16, two heads: keys of 4, values of 8; short convolutions of width 4 on q, k and v
    conv = tuple(torch.zeros(1, width, 4, device=device) for width in (8, 8, 16))
    start = (RecurrentState(torch.zeros(1, 2, 4, 8, device=device), conv),)
    with torch.no_grad():
        logits, _ = read(tokens, start)
        head, states = read(tokens[:, :77], start)
        tail, _ = read(tokens[:, 77:], states)
        torch.testing.assert_close(torch.cat([head, tail], 1), logits, rtol=1e-4, atol=1e-5)
        states, each = start, []
        for t in range(100):
            y, states = step(tokens[:, t : t + 1], states)
            assert isinstance(states[0], RecurrentState)
            each.append(y)
        torch.testing.assert_close(torch.cat(each, 1), logits, rtol=1e-4, atol=1e-5)


def test_interrupted_and_continued_equals_uninterrupted(
    text: Path, tmp_path: Path, main: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test of all that takes long, so that processes that share the tests do not repeat it.

    The whole run has the compiler's cache of the other, so that one of the two compiles.
    """
    path, whole, temporary = (tmp_path / name for name in ("interrupted", "whole", "temporary"))
    temporary.mkdir()
    said, complaint = interrupted(path, text, "compiling", TMPDIR=str(temporary))
    assert "still compiling: stopping after this step" in complaint
    assert "interrupted at step 1;" in said
    shutil.copytree(path / "compiler-cache", whole / "compiler-cache")
    uninterrupted = run(whole, text, TMPDIR=str(temporary))
    check_whole_run(whole, uninterrupted)
    check_export(whole)
    assert not list(temporary.iterdir())

    said, complaint = interrupted(path, text, "training")
    assert "stopping after this step" in complaint
    assert "continuing from step 1 " in said
    assert torch.load(path / "checkpoint.pt")["step"] > 1

    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # which the example sets
        monkeypatch.setenv(name, str(temporary))
    with pytest.raises(SystemExit, match="is of a run with --lr 0.02, this one has 0.001"):
        main(command(path, text, "--lr", "0.001")[2:])

    result = run(path, text)
    assert result.returncode == 0, result.stderr
    assert "continuing from step" in result.stdout
    if torch.cuda.is_available():  # sums of embedding gradients there depend on the order of arrival
        assert losses(result.stdout) == pytest.approx(losses(uninterrupted.stdout), rel=0.05)
        return
    assert losses(result.stdout) == losses(uninterrupted.stdout)
    expected, actual = exported(whole), exported(path)
    assert expected.keys() == actual.keys()
    for name in expected:
        assert torch.equal(expected[name], actual[name]), name
    assert not (path / "checkpoint.pt").exists()


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], None]:
    return runpy.run_path(str(SCRIPT))["main"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file or directory"), (b"", "has 0 bytes"), (b"too short", "has 9 bytes")],
)
def test_bad_text(main: Callable, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=f"^error: --text .*{message}"):
        main(command(tmp_path / "out", path)[2:])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "argument --steps: expected a positive integer, got '0'"),
        (["--segment", "1"], "argument --segment: expected at least 2, got 1"),
        (["--width", "18"], "argument --width: expected a multiple of twice --heads 2, got 18"),
        (["--lr", "-1"], "argument --lr: expected a positive number, got -1.0"),
        (["--prompt", ""], "argument --prompt: expected at least one character, got ''"),
    ],
)
def test_bad_option(
    main: Callable,
    options: list[str],
    message: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(command(tmp_path, text, *options)[2:])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
