"""Folders in every released form, written by an independent oracle, read as the split layout."""

from pathlib import Path

import pytest
import torch
from released_folders import released
from released_forms import CASES, open_stored, options_of
from released_oracle import FLASH, Shape
from torch import Tensor

from automimo.checkpoint import CheckpointReader, TensorInfo
from automimo.checkpoint.tensor_reader import TensorReader

QKV = "model.layers.0.self_attn.qkv_proj.weight"
MEDIA = ("visual.", "audio_encoder.", "speech_embeddings.")


@pytest.mark.parametrize(("shape", "form"), CASES)
def test_every_tensor_reads_as_the_oracle_decodes_it(tmp_path: Path, shape: Shape, form: str) -> None:
    decoded = released(tmp_path / "model", shape, form, shards=2)
    with CheckpointReader(tmp_path / "model") as reader:
        stored = open_stored(reader, options_of(shape, form))
        text = {key: value for key, value in decoded.items() if not key.startswith(MEDIA)}
        assert stored.matrices.keys() == text.keys()
        assert sorted(stored.raw) == sorted(key for key in decoded if key.startswith(MEDIA))
        for key, expected in text.items():
            assert torch.equal(stored.read(key, torch.float32), expected), key
            assert torch.equal(stored.read(key, torch.bfloat16), expected.to(torch.bfloat16)), key
            strided = torch.full(expected.shape[::-1], torch.nan).permute(*range(expected.dim())[::-1])
            stored.read_into(key, strided)
            assert torch.equal(strided, expected), key


@pytest.mark.parametrize(("shape", "form"), CASES)
def test_every_stored_tensor_is_accounted_for_once(tmp_path: Path, shape: Shape, form: str) -> None:
    released(tmp_path / "model", shape, form)
    with CheckpointReader(tmp_path / "model") as reader:
        stored = open_stored(reader, options_of(shape, form))
        used = {tensor.key for matrix in stored.matrices.values() for tensor in matrix.stored}
        assert used.isdisjoint(stored.raw)
        assert used | set(stored.raw) == reader.tensors.keys()
        rows: dict[str, list[int]] = {}
        for matrix in stored.matrices.values():
            whole = [(0, matrix.weight.shape[0])] if matrix.weight.shape else []
            for first, count in matrix.rows or whole:
                rows.setdefault(matrix.weight.key, []).extend(range(first, first + count))
        for key, found in rows.items():
            assert sorted(found) == list(range(reader.tensors[key].shape[0])), key


@pytest.mark.parametrize(
    ("form", "key", "row_bytes", "scales"),
    [
        ("fp8-fused", "model.layers.0.self_attn.q_proj.weight", 160, [f"{QKV}_scale_inv"]),
        ("fp8-fused", "model.layers.0.self_attn.v_proj.weight", 160, [f"{QKV}_scale_inv"]),
        ("bf16-fused", "model.layers.0.self_attn.k_proj.weight", 320, []),
        ("mxfp4-fused", "model.layers.1.mlp.experts.7.gate_proj.weight", 80 + 5, []),
        ("bf16-split", "model.embed_tokens.weight", 320, []),
    ],
)
def test_reading_rows_reads_their_bytes_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, key: str, row_bytes: int, scales: list[str]
) -> None:
    decoded = released(tmp_path / "model", FLASH, form)
    read = 0
    fill = TensorReader._fill

    def counting(self: TensorReader, info: TensorInfo, offset: int, buffer: Tensor) -> None:
        nonlocal read
        read += buffer.nbytes
        fill(self, info, offset, buffer)

    monkeypatch.setattr(TensorReader, "_fill", counting)
    with CheckpointReader(tmp_path / "model") as reader:
        stored = open_stored(reader, options_of(FLASH, form))
        rows = decoded[key].shape[0]
        for start, stop in ((0, rows), (rows // 3, rows // 2), (rows // 2, rows // 2 + 1), (5, 5)):
            read = 0
            assert torch.equal(stored.read(key, torch.float32, start=start, stop=stop), decoded[key][start:stop])
            assert read == (stop - start) * row_bytes + sum(reader.tensors[scale].nbytes for scale in scales)
