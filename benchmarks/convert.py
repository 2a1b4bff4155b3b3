"""`convert --to bf16` against plainly reading the source and writing as many bytes as the result has.

    python benchmarks/convert.py [--gib 2] [--folder DIR] [--quick]

Makes a V2.5-like (FP8) and a V2.6-like (MXFP4 experts) checkpoint with released matrix shapes and as many experts as
fit the size, then times, in turn and in one process: the plain copy (one thread, 16 MiB at a time) and the conversion
(one worker per core). Both synchronise what they wrote to the disk. Prints the ratio, GB/s, and the peak memory of the
conversion above what the process had before.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measure import peak_mib, reset_peak
from rich.console import Console

from automimo.checkpoint import CheckpointReader, PlannedTensor, TensorInfo, Unit, plan_files, write_units
from automimo.convert import ConvertOptions, convert_checkpoint
from automimo.mimo_v2_flash.presets import preset_config
from automimo.mimo_v2_flash.storage import StoredTensor
from automimo.mimo_v2_flash.storage.key_table import key_table

CHUNK = 16 * 2**20
PRESETS = {"fp8": "v2.5", "mxfp4": "v2.6-flash"}


def random_tensor(tensor: StoredTensor, seed: int) -> torch.Tensor:
    """Codes without NaN, scales near those of real weights."""
    generator = torch.Generator().manual_seed(seed)
    if tensor.dtype == "F32":
        return torch.rand(tensor.shape, generator=generator) * 1e-3
    if tensor.key.endswith("weight_scale"):
        return torch.randint(110, 126, tensor.shape, dtype=torch.uint8, generator=generator)
    if tensor.dtype == "BF16":
        return torch.randn(tensor.shape, generator=generator).bfloat16()
    codes = torch.randint(0, 0x7E, tensor.shape, dtype=torch.uint8, generator=generator)
    return codes.view(torch.float8_e4m3fn) if tensor.dtype == "F8_E4M3" else codes


def make_source(folder: Path, quantisation: str, gib: float, quick: bool) -> None:
    """A checkpoint of two layers (one dense and full, one sliding with experts) of about `gib` GiB."""
    changes = {"hidden_size": 512, "moe_intermediate_size": 256, "intermediate_size": 1024} if quick else {}
    config = preset_config(
        PRESETS[quantisation],
        num_hidden_layers=2,
        hybrid_layer_pattern=[0, 1],
        moe_layer_freq=[0, 1],
        vocab_size=4096,
        n_routed_experts=8,
        vision_config=None,
        audio_config=None,
        processor_config=None,
        eos_token_id=0,
        pad_token_id=0,
        **dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")),
        **changes,
    )

    def table(experts: int) -> dict[str, StoredTensor]:
        config.n_routed_experts = experts
        return key_table(config, quantisation=quantisation, mtp_layers=0)

    def size(experts: int) -> int:
        return sum(PlannedTensor(t.key, t.dtype, t.shape).nbytes for t in table(experts).values())

    per_expert = size(9) - size(8)
    tensors = table(8 + max(0, round((gib * 2**30 - size(8)) / per_expert)))
    units = [
        Unit((PlannedTensor(t.key, t.dtype, t.shape),), lambda t=t, i=i: [random_tensor(t, i)], 0)
        for i, t in enumerate(tensors.values())
    ]
    write_units(folder, units, plan_files(units, 2**30, index=True), workers=2, metadata={"benchmark": "convert"})
    (folder / "config.json").write_text(json.dumps(config.to_diff_dict()))


def plain_copy(source: Path, target: Path, output_bytes: int) -> None:
    """Read every byte of the source, write `output_bytes`, both 16 MiB at a time."""
    target.mkdir()
    buffer = bytearray(CHUNK)
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    with (target / "bytes").open("wb", buffering=0) as file:
        for start in range(0, output_bytes, CHUNK):
            file.write(memoryview(buffer)[: min(CHUNK, output_bytes - start)])
        os.fsync(file.fileno())


def timed(work: Callable[[Path], object], target: Path) -> float:
    os.sync()  # what earlier rounds left to be written must not be written in this one
    start = time.perf_counter()
    work(target)
    return time.perf_counter() - start


def run(root: Path, quantisation: str, gib: float, repeats: int, quick: bool) -> None:
    source = root / quantisation
    make_source(source, quantisation, gib, quick)
    quiet = Console(quiet=True)
    convert = partial(convert_checkpoint, source, options=ConvertOptions("bf16"), console=quiet)
    convert(root / "warm")
    read = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    wrote = sum(path.stat().st_size for path in (root / "warm").glob("*.safetensors"))
    shutil.rmtree(root / "warm")
    plain, ours = [], []
    reset_peak()
    before = peak_mib()
    for _ in range(repeats):
        plain.append(timed(lambda target: plain_copy(source, target, wrote), root / "plain"))
        shutil.rmtree(root / "plain")
        ours.append(timed(convert, root / "ours"))
        largest = max(info.nbytes for info in _infos(root / "ours")) / 2**20
        shutil.rmtree(root / "ours")
    memory = peak_mib() - before
    seconds = "; ".join(f"{a:.2f} and {b:.2f}" for a, b in zip(plain, ours, strict=True))
    print(f"{PRESETS[quantisation]:>10}: seconds of plain copy and conversion, in turn: {seconds}")
    print(
        f"{PRESETS[quantisation]:>10} -> bf16  read {read / 1e9:.2f} GB, wrote {wrote / 1e9:.2f} GB; "
        f"plain copy {min(plain):.2f} s, convert {min(ours):.2f} s ({(read + wrote) / min(ours) / 1e9:.2f} GB/s), "
        f"ratio {min(ours) / min(plain):.2f}; peak memory {memory:.0f} MiB (largest tensor {largest:.0f} MiB)"
    )


def _infos(folder: Path) -> list[TensorInfo]:
    with CheckpointReader(folder) as reader:
        return list(reader.tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of each source")
    parser.add_argument("--folder", type=Path, help="where to make the folders (default: a temporary one)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="very small, to see that it runs")
    arguments = parser.parse_args()
    gib = 0.02 if arguments.quick else arguments.gib
    with TemporaryDirectory(dir=arguments.folder) as name:
        for quantisation in PRESETS:
            run(Path(name), quantisation, gib, 1 if arguments.quick else arguments.repeats, arguments.quick)
    print("required: at most 2.0 times the plain copy")


if __name__ == "__main__":
    main()
