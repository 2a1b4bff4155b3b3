"""The header of one safetensors file, read strictly.

Layout of the format (safetensors, FORMAT section of its README): 8 bytes little-endian header length N, N bytes of
JSON (a mapping from key to `{"dtype", "shape", "data_offsets"}`, optionally `__metadata__` with strings), then the
tensors. `data_offsets` count from the end of the header; the tensors cover the rest without holes or overlaps.

A file that breaks any of these rules is refused before a byte of a tensor is read: a checkpoint that is only almost
right is read wrongly by the next tool.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from automimo.errors import CheckpointError

# The limit of the reference implementation. The largest released MiMo-V2 file needs under 20 MB.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"
# A dimension is a signed 64-bit number in torch.
_MAX_ELEMENTS = 2**63 - 1

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `begin` and `end` are absolute offsets in `file`, `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]


def dtype_name(dtype: torch.dtype | str) -> str:
    """The safetensors name of a dtype (`torch.bfloat16` -> `"BF16"`); names are checked and returned as they are.

    Raises CheckpointError for a dtype that a safetensors file cannot hold.
    """
    name = DTYPE_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in TORCH_DTYPES:
        raise CheckpointError(f"dtype {dtype} cannot be stored in safetensors; known are {', '.join(TORCH_DTYPES)}")
    return name


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this safetensors dtype and shape."""
    return math.prod(shape) * TORCH_DTYPES[dtype].itemsize


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Read and check the header of a safetensors file.

    Returns the tensors by key, in the order of their bytes, and the file's `__metadata__` (empty when it has none).
    Raises CheckpointError, naming the file and the key, for anything that is not a complete well-formed file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = _header_bytes(path, file.read(LENGTH_BYTES), size, file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    header = parse_json(raw, str(path))
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object but {type(header).__name__}")
    metadata = _metadata(path, header.pop(METADATA_KEY, {}))
    data_begin = LENGTH_BYTES + len(raw)
    tensors = [_tensor_info(path, key, entry, data_begin) for key, entry in header.items()]
    tensors.sort(key=lambda info: (info.begin, info.end))
    _check_coverage(path, tensors, data_begin, size)
    return {info.name: info for info in tensors}, metadata


def parse_json(raw: bytes, where: str, *, non_finite: bool = False) -> Any:
    """Parse JSON strictly: UTF-8 only, no key twice in one object, no NaN or Infinity unless `non_finite`.

    Python's parser takes those words, which are no JSON, and makes an infinity of 1e999; other readers refuse the file
    or see another number. `where` starts the message of the CheckpointError.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{where}: the key {twice!r} appears twice; one of them would be lost")
        return result

    def finite(text: str) -> float:
        number = float(text)
        if not (math.isfinite(number) or non_finite):
            raise CheckpointError(f"{where}: {text:.40} is no finite number; write one, or null where that is allowed")
        return number

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{where}: not valid JSON in UTF-8: {error}") from error


def _header_bytes(path: Path, prefix: bytes, size: int, file: Any) -> bytes:
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file; download or write it again")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the header claims {length} bytes (limit {MAX_HEADER_BYTES}); this is no safetensors file"
        )
    if LENGTH_BYTES + length > size:
        raise CheckpointError(
            f"{path}: the header claims {length} bytes but the file ends {LENGTH_BYTES + length - size} bytes earlier; "
            "it is truncated or no safetensors file"
        )
    raw: bytes = file.read(length)
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path}: the header does not start with '{{'; this is no safetensors file")
    return raw


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CheckpointError(f"{path}: {METADATA_KEY} must map strings to strings, got {value!r:.200}")
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0  # bool is an int too


def _tensor_info(path: Path, key: str, entry: Any, data_begin: int) -> TensorInfo:
    where = f"{path}: tensor {key!r}"
    if not key.isprintable() and any("\ud800" <= char <= "\udfff" for char in key):
        raise CheckpointError(f"{where}: the key is not valid Unicode")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected exactly dtype, shape and data_offsets, got {entry!r:.200}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}; known are {', '.join(TORCH_DTYPES)}")
    if not isinstance(shape, list) or not all(_is_size(dim) for dim in shape):
        raise CheckpointError(f"{where}: shape {shape!r:.200} is not a list of sizes >= 0")
    if math.prod(dim or 1 for dim in shape) > _MAX_ELEMENTS:
        raise CheckpointError(f"{where}: shape {shape!r:.200} is larger than 64-bit sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(f"{where}: data_offsets {offsets!r:.200} are not two numbers >= 0")
    begin, end = offsets
    if end - begin != tensor_bytes(dtype, shape):
        raise CheckpointError(
            f"{where}: data_offsets {offsets} hold {end - begin} bytes, but {dtype} {shape} needs "
            f"{tensor_bytes(dtype, shape)}"
        )
    return TensorInfo(key, dtype, tuple(shape), path, data_begin + begin, data_begin + end)


def _check_coverage(path: Path, tensors: list[TensorInfo], data_begin: int, size: int) -> None:
    """Every byte after the header belongs to exactly one tensor. `tensors` are sorted by their offsets."""
    position = data_begin
    for info in tensors:
        if info.begin < position:
            raise CheckpointError(
                f"{path}: tensor {info.name!r} overlaps the one before it by {position - info.begin} B"
            )
        if info.begin > position:
            raise CheckpointError(
                f"{path}: {info.begin - position} bytes before tensor {info.name!r} belong to no tensor"
            )
        position = info.end
    if position > size:
        lost = next(info.name for info in tensors if info.end > size)
        raise CheckpointError(
            f"{path}: truncated, {position - size} bytes are missing (first tensor cut: {lost!r}); "
            "download or write the file again"
        )
    if position < size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor belong to no tensor")
