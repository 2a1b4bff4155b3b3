"""The verbs `convert` and `inspect` on folders, in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from automimo import load_model

from .conftest import check_readable_failure, run_cli


def test_there_and_back(tiny_model: Path, tmp_path: Path) -> None:
    done = run_cli("convert", tiny_model, tmp_path / "fp8", "--to", "fp8", "--verify", "--workers", "2")
    assert done.returncode == 0, done.stderr
    for words in ("source ", "split attention", "wrote ", "GB/s", "quantised anew", "verified ", "e4m3 steps", "done "):
        assert words in done.stdout
    assert done.stderr == ""
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    assert stored["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert (tmp_path / "fp8" / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()
    seen = run_cli("inspect", tmp_path / "fp8")
    assert seen.returncode == 0, seen.stdout
    assert "FP8" in seen.stdout
    # The model loads as it is, and as BF16 it is what the FP8 file means.
    done = run_cli("convert", tmp_path / "fp8", tmp_path / "bf16", "--to", "bf16")
    assert done.returncode == 0, done.stderr
    state = load_model(tmp_path / "fp8", dtype=torch.bfloat16).state_dict()
    for name, value in load_model(tmp_path / "bf16", dtype=torch.bfloat16).state_dict().items():
        assert torch.equal(value, state[name]), name
    done = run_cli("convert", tmp_path / "bf16", tmp_path / "again", "--like", tmp_path / "fp8")
    assert done.returncode == 0, done.stderr
    for key, value in load_file(tmp_path / "again" / "model.safetensors").items():
        assert torch.equal(value.view(torch.uint8), stored[key].view(torch.uint8)), key


@pytest.mark.slow
def test_refusals(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_readable_failure(run_cli("convert", tiny_model, out), "either --to")
    check_readable_failure(run_cli("convert", tmp_path / "none", out, "--to", "bf16"), "no such folder")
    check_readable_failure(run_cli("convert", tiny_model, out, "--to", "fp4", "--verify"), "Usage", code=2)
    done = run_cli("convert", tiny_model, out, "--to", "fp8", "--layout", "fused", "--checkpoint-tp", "5")
    check_readable_failure(done, "not divisible by 5")
    out.mkdir()
    (out / "mine").write_text("x")
    check_readable_failure(run_cli("convert", tiny_model, out, "--to", "bf16"), "exists already", str(out))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.slow
def test_a_fused_copy_that_does_not_tell_its_order(tiny_model: Path, tmp_path: Path) -> None:
    done = run_cli("convert", tiny_model, tmp_path / "fused", "--to", "bf16", "--layout", "fused")
    assert done.returncode == 0, done.stderr
    index = tmp_path / "fused" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["metadata"]["tp_size"]
    index.write_text(json.dumps(content))
    seen = run_cli("inspect", tmp_path / "fused")
    assert seen.returncode == 1
    assert "--source-tp" in seen.stdout
    done = run_cli("generate", tmp_path / "fused", "--prompt", "x")
    check_readable_failure(done, "--source-tp", "--source-layout contiguous")
    seen = run_cli("inspect", tmp_path / "fused", "--source-layout", "contiguous")
    assert seen.returncode == 0, seen.stdout


SLOW_DISK = """
import sys, time
from automimo.checkpoint import parallel_writer
from automimo.cli import main
write = parallel_writer._Output.write

def slow(self, file, offset, piece):
    time.sleep(0.2)  # so that no load of the machine lets the work end before the signal comes
    write(self, file, offset, piece)

parallel_writer._Output.write = slow
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_interrupted_conversion_goes_on(tiny_model: Path, tmp_path: Path, number: signal.Signals) -> None:
    words = ["convert", str(tiny_model), str(tmp_path / "out"), "--to", "bf16"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_DISK, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.work/content/.*.partial")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.work").is_dir()
    assert "Traceback" not in err
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "the same command goes on" in out
        assert str(tmp_path / ".out.work") in out
    done = run_cli(*words)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    done = run_cli(*words[:2], tmp_path / "undisturbed", *words[3:])
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "undisturbed").iterdir())
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
