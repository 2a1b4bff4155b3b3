"""A conversion holds pieces, not the checkpoint: the peak resident memory of a child process is measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from released_folders import config
from released_oracle import FLASH

CHILD = r"""
import json, sys
from pathlib import Path
import torch
from rich.console import Console
from safetensors.torch import save_file
from automimo.convert import ConvertOptions, convert_checkpoint
folder, experts, to = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ROWS, COLUMNS = 2048, 1024

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

def make(name, count):
    source = folder / name
    source.mkdir()
    (source / "config.json").write_text((folder / "config.json").read_text())
    weight_map = {}
    for i in range(count):
        key = f"model.layers.1.mlp.experts.{i}.up_proj.weight"
        codes = torch.randint(0, 126, (ROWS, COLUMNS), dtype=torch.uint8).view(torch.float8_e4m3fn)
        tensors = {key: codes, f"{key}_scale_inv": torch.rand(ROWS // 128, COLUMNS // 128)}
        save_file(tensors, source / f"part{i}.safetensors")
        weight_map.update(dict.fromkeys(tensors, f"part{i}.safetensors"))
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return source

def convert(source, target):
    options = ConvertOptions(to, max_shard_bytes=2**26)
    convert_checkpoint(source, folder / target, options, workers=2, verify=True, console=Console(quiet=True))

convert(make("small", 2), "warm")
source = make("source", experts)
Path("/proc/self/clear_refs").write_text("5")
start = peak()
convert(source, "out")
print(json.dumps(peak() - start))
"""


@pytest.mark.parametrize("to", ["bf16", "mxfp4"])
def test_peak_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, to: str) -> None:
    growth = {}
    for experts in (6, 48):
        folder = tmp_path / str(experts)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config(FLASH, "fp8-fused")))
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(folder), str(experts), to],
            # As in the memory test of the reader: freed blocks of 1 MiB and more go back to the system at once.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        assert child.returncode == 0, child.stderr
        growth[experts] = json.loads(child.stdout)
    # An expert is 2 MiB of codes, 8 MiB in fp32. Two workers and the comparison in fp32 hold a few of them each; all 48
    # are 96 MiB of codes and 192 MiB of BF16.
    assert growth[48] < 72 * 2**20, growth
    assert growth[48] < growth[6] + 24 * 2**20, growth
