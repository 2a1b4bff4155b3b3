"""In which dtype matrices travel between ranks: narrow, and yet the bits of a direct read."""

from pathlib import Path

import pytest
import torch
from released_folders import released
from released_forms import open_stored, options_of
from released_oracle import FLASH

from automimo.checkpoint import CheckpointReader
from automimo.mimo_v2_flash.sharded_weights import exchange_dtype, local_part

PARTS = ("gate", "up", "down")


@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("form", "widest"),
    # Bytes of an element on its way: FP8 has values of 28 bits of mantissa rounded to 24, which bf16 cannot hold.
    [("bf16-split", 2), ("mxfp4-fused", 2), ("fp8-fused", 8)],
)
def test_matrices_travel_without_loss(tmp_path: Path, form: str, widest: int, target: torch.dtype) -> None:
    released(tmp_path / "model", FLASH, form, side_files=False)
    keys = [f"model.layers.1.mlp.experts.{e}.{part}_proj.weight" for e in (0, 11) for part in PARTS]
    with CheckpointReader(tmp_path / "model") as reader:
        source = open_stored(reader, options_of(FLASH, form))
        dtype = exchange_dtype(source, keys, target)
        assert dtype.itemsize <= min(widest, target.itemsize)
        for key in keys:
            assert torch.equal(source.read(key, dtype).to(target), source.read(key, target)), key


def test_matrices_of_several_kinds_travel_in_a_dtype_for_all(tmp_path: Path) -> None:
    released(tmp_path / "model", FLASH, "mxfp4-fused", side_files=False)
    expert, dense = "model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.up_proj.weight"
    bf16 = "model.embed_tokens.weight"
    with CheckpointReader(tmp_path / "model") as reader:
        source = open_stored(reader)
        assert [source.matrices[key].encoding for key in (expert, dense, bf16)] == ["mxfp4", "fp8", "plain"]
        assert exchange_dtype(source, [expert, bf16], torch.float32) == torch.bfloat16
        assert exchange_dtype(source, [expert, dense], torch.float32) == torch.float32


def test_plain_tensors_are_whole() -> None:
    for shape in [(), (0,), (3,), (4, 5), (2, 3, 4)]:
        tensor = torch.empty(shape)
        part = local_part("name", tensor)
        assert part.memory is tensor
        assert (part.first, part.stop, part.cut) == (0, shape[0] if shape else 1, None)
