"""Safetensors files built byte by byte: the well-formed ones are read, each broken rule is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from automimo.checkpoint import CheckpointReader, dtype_name, read_header
from automimo.checkpoint.reader import index_text
from automimo.checkpoint.safetensors_file import TORCH_DTYPES, parse_json
from automimo.errors import CheckpointError


def build(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_file_of_the_reference_library(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6, dtype=torch.int64).reshape(2, 3), "a": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "who": "library"})
    infos, metadata = read_header(tmp_path / "x.safetensors")
    assert metadata == {"format": "pt", "who": "library"}
    raw = (tmp_path / "x.safetensors").read_bytes()
    for key, tensor in tensors.items():
        info = infos[key]
        assert (info.name, info.shape, info.torch_dtype) == (key, tuple(tensor.shape), tensor.dtype)
        assert (info.nbytes, info.numel) == (tensor.nbytes, tensor.numel())
        assert raw[info.begin : info.end] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert (infos["a"].dtype, infos["b"].dtype) == ("BF16", "I64")


def test_hand_made_file_with_padding_scalar_and_empty_tensor(tmp_path: Path) -> None:
    header = json.dumps({"s": entry("U8", [], 0, 1), "e": entry("F32", [0, 7], 1, 1), "v": entry("U8", [2], 1, 3)})
    path = build(tmp_path / "x.safetensors", header.encode() + b"   ", b"\x07\x08\x09")
    infos, metadata = read_header(path)
    begin = 8 + len(header) + 3
    assert metadata == {}
    assert [(i.name, i.begin - begin, i.end - begin) for i in infos.values()] == [("s", 0, 1), ("e", 1, 1), ("v", 1, 3)]
    assert infos["e"].shape == (0, 7)


def test_a_file_without_tensors(tmp_path: Path) -> None:
    assert read_header(build(tmp_path / "x.safetensors", {})) == ({}, {})


BROKEN: dict[str, tuple[Any, bytes, str]] = {
    "unknown dtype": ({"k": entry("F4", [4], 0, 2)}, b"xx", r"'k'.*unknown dtype 'F4'"),
    "dtype is no string": ({"k": entry(7, [1], 0, 1)}, b"x", r"'k'.*unknown dtype 7"),  # type: ignore[arg-type]
    "negative dimension": ({"k": entry("U8", [-1], 0, 1)}, b"x", r"'k'.*\[-1\]"),
    "dimension is a float": ({"k": entry("U8", [1.0], 0, 1)}, b"x", r"'k'.*\[1.0\]"),
    "dimension is a boolean": ({"k": entry("U8", [True], 0, 1)}, b"x", r"'k'.*\[True\]"),
    "shape is no list": ({"k": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}, b"x", r"'k'.*shape 1"),
    "huge shape without elements": ({"k": entry("U8", [0, 2**70], 0, 0)}, b"", r"'k'.*64-bit"),
    "huge product": ({"k": entry("U8", [2**40, 2**40], 0, 1)}, b"x", r"'k'.*64-bit"),
    "offsets do not match the shape": ({"k": entry("F32", [2], 0, 7)}, b"x" * 7, r"'k'.*hold 7 bytes.*needs 8"),
    "offsets backwards": ({"k": entry("U8", [1], 1, 0)}, b"x", r"'k'.*hold -1 bytes"),
    "negative offsets": ({"k": entry("U8", [1], -1, 0)}, b"x", r"'k'.*data_offsets"),
    "three offsets": ({"k": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, b"x", r"'k'.*data_offsets"),
    "missing field": ({"k": {"dtype": "U8", "shape": [1]}}, b"x", r"'k'.*exactly dtype, shape and data_offsets"),
    "unknown field": ({"k": {**entry("U8", [1], 0, 1), "x": 1}}, b"x", r"'k'.*exactly dtype"),
    "entry is no object": ({"k": [1]}, b"", r"'k'.*exactly dtype"),
    "overlap": ({"a": entry("U8", [2], 0, 2), "k": entry("U8", [2], 1, 3)}, b"xxx", r"'k' overlaps"),
    "same bytes twice": ({"a": entry("U8", [2], 0, 2), "k": entry("U8", [2], 0, 2)}, b"xx", r"'k' overlaps"),
    "hole": ({"a": entry("U8", [1], 0, 1), "k": entry("U8", [1], 2, 3)}, b"xxx", r"1 bytes before tensor 'k'"),
    "hole at the start": ({"k": entry("U8", [1], 1, 2)}, b"xx", r"1 bytes before tensor 'k'"),
    "trailing bytes": ({"k": entry("U8", [1], 0, 1)}, b"xyz", r"2 bytes after the last tensor"),
    "trailing bytes without tensors": ({}, b"x", r"1 bytes after the last tensor"),
    "truncated": ({"a": entry("U8", [1], 0, 1), "k": entry("F32", [4], 1, 17)}, b"x" * 7, r"10 bytes are missing.*'k'"),
    "not an object": ([1], b"", r"does not start with"),
    "broken JSON": (b'{"k": ', b"", r"not valid JSON"),
    "text after the JSON": (b"{} x", b"", r"not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", r"not valid JSON in UTF-8"),
    "lone surrogate": (b'{"\\ud800": {"dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"x", r"not valid Unicode"),
    "deep nesting": (b'{"k":' + b"[" * 100_000, b"", r"not valid JSON"),
    "endless number": (b'{"k":' + b"9" * 10_000 + b"}", b"", r"not valid JSON"),
    "not a number": (b'{"k": NaN}', b"", r"NaN is no finite number"),
    "infinity": (b'{"k": [1, Infinity]}', b"", r"Infinity is no finite number"),
    "negative infinity": (b'{"k": {"shape": -Infinity}}', b"", r"-Infinity is no finite number"),
    "number that overflows": (b'{"k": -1e999}', b"", r"-1e999 is no finite number"),
    "key twice": (
        b'{"k":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"k":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"xx",
        r"'k' appears twice",
    ),
    "field twice": (
        b'{"k":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
        r"'dtype' appears twice",
    ),
    "metadata is no object": ({"__metadata__": "x"}, b"", r"__metadata__"),
    "metadata holds a number": ({"__metadata__": {"a": 1}}, b"", r"__metadata__"),
}


@pytest.mark.parametrize("case", BROKEN, ids=[name.replace(" ", "_") for name in BROKEN])
def test_broken_headers(tmp_path: Path, case: str) -> None:
    header, data, message = BROKEN[case]
    path = build(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: .*" + message):
        read_header(path)


def test_only_who_asks_gets_numbers_that_are_not_finite() -> None:
    raw = b'{"a": [NaN, Infinity, -Infinity, 1e999, 0.1]}'
    with pytest.raises(CheckpointError, match=r"here: NaN is no finite number"):
        parse_json(raw, "here")
    nan, *others = parse_json(raw, "here", non_finite=True)["a"]
    assert math.isnan(nan)
    assert others == [math.inf, -math.inf, math.inf, 0.1]


def test_an_index_with_numbers_that_are_no_json_is_refused_and_never_written(tmp_path: Path) -> None:
    save_file({"k": torch.ones(1)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": NaN}, "weight_map": {"k": "a.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"index\.json: NaN is no finite number"):
        CheckpointReader(tmp_path)
    with pytest.raises(ValueError, match="JSON compliant"):
        index_text({"k": "a.safetensors"}, {"share": math.nan})


@pytest.mark.parametrize("size", [0, 1, 7])
def test_files_shorter_than_the_length_field(tmp_path: Path, size: int) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\x00" * size)
    with pytest.raises(CheckpointError, match=rf"bad\.safetensors: {size} bytes are too few"):
        read_header(path)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (3, r"ends 1 bytes earlier"),
        (100_000_000, r"ends 99999998 bytes earlier"),
        (100_000_001, r"claims 100000001 bytes \(limit 100000000\)"),
        (2**64 - 1, r"claims 18446744073709551615 bytes"),
    ],
)
def test_header_length_past_the_end_or_absurd(tmp_path: Path, length: int, message: str) -> None:
    path = build(tmp_path / "bad.safetensors", b"{}", length=length)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_every_truncation_and_every_header_byte_flip_is_refused_or_harmless(tmp_path: Path) -> None:
    """A flipped bit may change a name or a dtype of equal width; it never gives a tensor outside the file."""
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(4, dtype=torch.float32), "v": torch.ones(3, dtype=torch.int32)}, path)
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            read_header(path)
    refused = 0
    for position in range(len(good) - 28):
        for bit in (0, 3, 6):
            path.write_bytes(good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1 :])
            try:
                infos, _ = read_header(path)
            except CheckpointError:
                refused += 1
            else:
                assert sum(info.nbytes for info in infos.values()) == 28
                assert max(info.end for info in infos.values()) == len(good)
    assert refused > (len(good) - 28) * 2


def test_unreadable_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "absent.safetensors")


def test_dtype_names_are_those_of_the_reference_library(tmp_path: Path) -> None:
    for name, dtype in TORCH_DTYPES.items():
        assert dtype_name(dtype) == dtype_name(name) == name
        save_file({"k": torch.zeros(8, dtype=torch.uint8).view(dtype)}, tmp_path / "x.safetensors")
        assert read_header(tmp_path / "x.safetensors")[0]["k"].dtype == name
    for unknown in (torch.complex128, "Q9"):
        with pytest.raises(CheckpointError, match=str(unknown)):
            dtype_name(unknown)
