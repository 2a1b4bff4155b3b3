"""Folders in every released form, written by an independent oracle, read as the split layout."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from released_folders import released
from released_forms import CASES, open_stored, options_of
from released_oracle import FLASH, Shape, decode_fp8_plain
from safetensors.torch import load_file, save_file
from torch import Tensor

from automimo.checkpoint import CheckpointReader, TensorInfo
from automimo.checkpoint.tensor_reader import TensorReader
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.storage import decode, read_matrix
from automimo.mimo_v2_flash.storage.matrices import fp8_matrix

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


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read, in order."""
    sizes: list[int] = []
    fill = TensorReader._fill

    def counting(self: TensorReader, info: TensorInfo, offset: int, buffer: Tensor) -> None:
        sizes.append(buffer.nbytes)
        fill(self, info, offset, buffer)

    monkeypatch.setattr(TensorReader, "_fill", counting)
    return sizes


def fused_scale_row(row: int, first: int, rows: int) -> int:
    """The row of scales of a row of q, k or v on a full layer of FLASH: 4 shards of 1088 rows, so 9 rows of scales
    each; the matrix has `rows` rows of a shard, from its row `first` on."""
    return row // rows * 9 + (first + row % rows) // 128


def flash_v_scale_row(row: int) -> int:
    """V2-Flash's v: a head's 128 rows follow its 192 of k in a strip of 3 rows of scales, of which k has 2 per head.
    Numbered with those of k first (8)."""
    block = (192 + row % 128) // 128
    return row // 128 * 2 + block if block < 2 else 8 + row // 128


@pytest.mark.parametrize(
    ("form", "key", "row_bytes", "scale_row"),
    [
        ("fp8-fused", "model.layers.0.self_attn.q_proj.weight", 160, lambda row: fused_scale_row(row, 0, 768)),
        ("fp8-fused", "model.layers.0.self_attn.k_proj.weight", 160, lambda row: fused_scale_row(row, 768, 192)),
        ("fp8-fused", "model.layers.0.self_attn.v_proj.weight", 160, lambda row: fused_scale_row(row, 960, 128)),
        ("fp8-flash", "model.layers.0.self_attn.v_proj.weight", 160, flash_v_scale_row),
        ("fp8-split-plain", "model.layers.0.mlp.gate_proj.weight", 160, lambda row: row // 128),
        ("bf16-fused", "model.layers.0.self_attn.k_proj.weight", 320, None),
        ("mxfp4-fused", "model.layers.1.mlp.experts.7.gate_proj.weight", 80 + 5, None),
        ("bf16-split", "model.embed_tokens.weight", 320, None),
    ],
)
def test_reading_rows_reads_their_bytes_and_no_others(
    tmp_path: Path,
    bytes_read: list[int],
    form: str,
    key: str,
    row_bytes: int,
    scale_row: Callable[[int], int] | None,
) -> None:
    decoded = released(tmp_path / "model", FLASH, form)
    with CheckpointReader(tmp_path / "model") as reader:
        stored = open_stored(reader, options_of(FLASH, form))
        rows = decoded[key].shape[0]
        near = [(1, 2), (5, 5), (31, 33), (rows // 3, rows // 2), (rows // 2, rows // 2 + 1), (rows - 1, rows)]
        for start, stop in [(0, rows), *near, *((n, min(n + 24, rows)) for n in range(0, rows, 24))]:
            # 160 columns have 2 fp32 scales in a row.
            scales = 0 if scale_row is None else 8 * len({scale_row(row) for row in range(start, stop)})
            for into in (False, True):
                bytes_read.clear()
                if into:  # a transposed view, as an expert is one
                    found = torch.full((160, stop - start), torch.nan).t()
                    stored.read_into(key, found, start=start, stop=stop)
                else:
                    found = stored.read(key, torch.float32, start=start, stop=stop)
                assert torch.equal(found, decoded[key][start:stop])
                assert sum(bytes_read) == (stop - start) * row_bytes + scales


def test_one_rank_of_512_reads_24_rows_of_scales_and_codes(tmp_path: Path, bytes_read: list[int]) -> None:
    """q of V2-Flash: 12288 rows. Every rank's part, at 1.1 times its bytes or less."""
    key, generator = "model.layers.0.self_attn.q_proj.weight", torch.Generator().manual_seed(0)
    codes = torch.randn(12288, 256, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(96, 2, generator=generator) + 0.5
    save_file({key: codes, f"{key}_scale_inv": scales}, tmp_path / "model.safetensors")
    expected = decode_fp8_plain(codes, scales)
    matrix = fp8_matrix(key, (12288, 256))
    with CheckpointReader(tmp_path) as reader:
        for rank in range(512):
            start, stop = 24 * rank, 24 * rank + 24
            bytes_read.clear()
            found = read_matrix(reader, matrix, dtype=torch.float32, start=start, stop=stop)
            assert torch.equal(found, expected[start:stop])
            assert sum(bytes_read) <= 1.1 * 24 * 256


@pytest.mark.parametrize("form", ["bf16-split", "bf16-fused", "fp8-fused", "fp8-flash", "mxfp4-fused"])
def test_pieces_of_any_size_give_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """What is held at a time is bounded: pieces begin at rows that are no multiples of 128."""
    decoded = released(tmp_path / "model", FLASH, form)
    monkeypatch.setattr(decode, "READ", 160 * 37)
    with CheckpointReader(tmp_path / "model") as reader:
        stored = open_stored(reader, options_of(FLASH, form))
        for key, expected in decoded.items():
            assert torch.equal(stored.read(key, torch.float32), expected), key
            rows = expected.shape[0]
            out = torch.full((rows - rows // 5, *expected.shape[1:]), torch.nan)
            stored.read_into(key, out, start=rows // 5)
            assert torch.equal(out, expected[rows // 5 :]), key


def test_rows_that_do_not_fit_their_destination_are_refused(tmp_path: Path) -> None:
    key = "model.embed_tokens.weight"
    released(tmp_path / "model", FLASH, "bf16-split")
    with CheckpointReader(tmp_path / "model") as reader:
        stored = open_stored(reader)
        with pytest.raises(CheckpointError, match=rf"{key}: rows 3:8 are \[5, 160\], their destination is \[4, 160\]"):
            stored.read_into(key, torch.empty(4, 160), start=3, stop=8)
        with pytest.raises(CheckpointError, match=rf"{key}: rows 3:321 of 320"):
            stored.read_into(key, torch.empty(318, 160), start=3, stop=321)


@pytest.mark.parametrize("what", ["codes", "scales"])
def test_damage_is_found_by_who_reads_it_and_named_with_its_file(tmp_path: Path, what: str) -> None:
    key = "model.layers.0.mlp.gate_proj.weight"
    released(tmp_path / "model", FLASH, "fp8-split-plain", side_files=False)
    file = tmp_path / "model" / "model_pp0_ep0_shard0.safetensors"
    tensors = load_file(file)
    if what == "codes":
        tensors[key].view(torch.uint8)[300, 7] = 0xFF
    else:
        tensors[f"{key}_scale_inv"][2, 1] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    with CheckpointReader(tmp_path / "model") as reader:
        stored = open_stored(reader)
        assert stored.read(key, start=0, stop=256).isfinite().all()
        with pytest.raises(CheckpointError) as error:
            stored.read(key, start=290, stop=310)
    assert str(error.value).startswith(f"{file}: {key}")
