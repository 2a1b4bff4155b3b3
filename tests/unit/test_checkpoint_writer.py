"""Written folders open with the reference library, round-trip bit for bit, and fail whole."""

import json
import resource
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from automimo.checkpoint import CheckpointReader, TensorEntry, raw_entry, tensor_entry, write_checkpoint
from automimo.checkpoint.safetensors_file import TORCH_DTYPES
from automimo.errors import CheckpointError

# The reference library opens F8_E8M0 files but its torch table has no such dtype.
LIBRARY_DTYPES = sorted(TORCH_DTYPES.keys() - {"F8_E8M0"})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[str]) -> torch.Tensor:
    """Random bits (NaN payloads included) of any dtype and shape, sometimes with reversed strides."""
    dtype = TORCH_DTYPES[draw(st.sampled_from(dtypes))]
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    size = int(torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)
    return tensor.permute(tuple(range(tensor.ndim))[::-1]) if draw(st.booleans()) else tensor


KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda key: key != "__metadata__"
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stored=st.dictionaries(KEYS, tensors(sorted(TORCH_DTYPES)), max_size=6),
    shard=st.sampled_from([1, 50, 300, 10**6]),
)
def test_round_trip_bit_for_bit(tmp_path: Path, stored: dict[str, torch.Tensor], shard: int) -> None:
    for name in ("first", "second"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    write_checkpoint(tmp_path / "first", [tensor_entry(k, t) for k, t in stored.items()], max_shard_bytes=shard)
    with CheckpointReader(tmp_path / "first") if stored else _no_tensors(tmp_path / "first") as reader:
        assert reader.tensors.keys() == stored.keys()
        # Copied raw into another sharding, with metadata, and read again.
        write_checkpoint(tmp_path / "second", [raw_entry(reader, key) for key in reader.tensors], max_shard_bytes=77)
        for key, tensor in stored.items():
            back = reader.read(key)
            assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor))
    with CheckpointReader(tmp_path / "second") as reader:
        assert {key: bits(reader.read(key)) for key in reader.tensors} == {k: bits(t) for k, t in stored.items()}


def _no_tensors(folder: Path) -> CheckpointReader:
    assert load_file(folder / "model.safetensors") == {}
    return CheckpointReader(folder)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stored=st.dictionaries(KEYS, tensors(LIBRARY_DTYPES), min_size=1, max_size=5))
def test_same_tensors_as_the_reference_library(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """Ours is opened by theirs, theirs by ours; the data parts are equal where the order of tensors is."""
    shutil.rmtree(tmp_path / "ours", ignore_errors=True)
    write_checkpoint(tmp_path / "ours", [tensor_entry(key, stored[key]) for key in sorted(stored)])
    theirs = load_file(tmp_path / "ours" / "model.safetensors")
    assert {k: (t.dtype, t.shape, bits(t)) for k, t in theirs.items()} == {
        k: (t.dtype, t.shape, bits(t)) for k, t in stored.items()
    }
    (tmp_path / "theirs").mkdir(exist_ok=True)
    save_file({k: t.contiguous() for k, t in stored.items()}, tmp_path / "theirs" / "model.safetensors")
    with CheckpointReader(tmp_path / "theirs") as reader:
        assert {k: bits(reader.read(k)) for k in reader.tensors} == {k: bits(t) for k, t in stored.items()}


def test_header_is_what_transformers_expects_and_data_is_aligned(tmp_path: Path) -> None:
    entries = [
        tensor_entry("u8", torch.zeros(3, dtype=torch.uint8)),
        tensor_entry("bf16", torch.zeros(3, dtype=torch.bfloat16)),
        tensor_entry("ключ", torch.zeros(1, dtype=torch.float64)),
        tensor_entry("f32", torch.zeros(5)),
    ]
    write_checkpoint(tmp_path, entries)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {"u8", "bf16", "ключ", "f32"}
    (length,) = struct.unpack("<Q", (tmp_path / "model.safetensors").read_bytes()[:8])
    assert length % 8 == 0
    with CheckpointReader(tmp_path) as reader:
        assert all(info.begin % info.torch_dtype.itemsize == 0 for info in reader.tensors.values())


def test_shards_index_and_report(tmp_path: Path) -> None:
    entries = [
        tensor_entry(key, torch.full((n,), n, dtype=torch.uint8))
        for key, n in [("a", 6), ("b", 4), ("c", 30), ("d", 1)]
    ]
    written = write_checkpoint(tmp_path, entries, max_shard_bytes=10, metadata={"tp_size": 4})
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names_in(tmp_path) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 41, "tp_size": 4},
        "weight_map": {"a": names[0], "b": names[0], "c": names[1], "d": names[2]},
    }
    for name in names:  # the index lists exactly what the shards hold
        assert set(load_file(tmp_path / name)) == {key for key, shard in index["weight_map"].items() if shard == name}
    assert (written.files, written.weight_map, written.total_bytes) == (tuple(names), index["weight_map"], 41)
    assert written.index == tmp_path / "model.safetensors.index.json"


def test_single_file_without_index_unless_metadata_needs_one(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "plain", [tensor_entry("a", torch.zeros(2))])
    assert (written.files, written.index) == (("model.safetensors",), None)
    assert names_in(tmp_path / "plain") == ["model.safetensors"]
    write_checkpoint(tmp_path / "tagged", [tensor_entry("a", torch.zeros(2))], metadata={"tp_size": 8})
    with CheckpointReader(tmp_path / "tagged") as reader:
        assert reader.files == ("model-00001-of-00001.safetensors",)
        assert reader.metadata == {"tp_size": 8, "total_size": 8}


def test_each_tensor_is_produced_once_and_let_go_before_the_next(tmp_path: Path) -> None:
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []

    def produce() -> torch.Tensor:
        assert all(reference() is None for reference in alive)
        tensor = torch.ones(1000)
        alive.append(weakref.ref(tensor))
        return tensor

    write_checkpoint(tmp_path, [TensorEntry(f"k{i}", torch.float32, (1000,), produce) for i in range(5)])
    assert len(alive) == 5


def test_raw_entry_renames_and_outlives_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", [tensor_entry("old", torch.arange(3))])
    with CheckpointReader(tmp_path / "a") as reader:
        entry = raw_entry(reader, "old", "new")
        write_checkpoint(tmp_path / "b", [entry])
        with pytest.raises(CheckpointError, match="no tensor 'absent'"):
            raw_entry(reader, "absent")
    with CheckpointReader(tmp_path / "b") as reader:
        assert reader.read("new").tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match="the reader is closed"):
        write_checkpoint(tmp_path / "c", [entry])
    assert list((tmp_path / "c").iterdir()) == []


# What fails leaves nothing behind


def fails(folder: Path, entries: list[TensorEntry], message: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(folder, entries, **options)
    assert not folder.exists() or list(folder.iterdir()) == []


def good(key: str = "good") -> TensorEntry:
    return tensor_entry(key, torch.ones(4))


def broken(dtype: torch.dtype | str, shape: tuple[int, ...], produced: Any) -> list[TensorEntry]:
    return [good(), TensorEntry("bad", dtype, shape, lambda: produced)]


@pytest.mark.parametrize("shard", [1, 10**6])
def test_produced_tensors_must_be_as_planned(tmp_path: Path, shard: int) -> None:
    for dtype, shape, produced, message in [
        (torch.float32, (3,), torch.ones(4), r"'bad' was planned as F32 \[3\] but came as F32 \[4\]"),
        (torch.float32, (2, 2), torch.ones(4), r"\[2, 2\] but came as F32 \[4\]"),
        (torch.bfloat16, (4,), torch.ones(4), r"BF16 \[4\] but came as F32 \[4\]"),
        ("I32", (4,), torch.ones(4), r"I32 \[4\] but came as F32"),
        ("U8", (4,), [b"12", b"3"], r"'bad' was planned with 4 bytes \(U8 \[4\]\) but came with 3"),
        ("U8", (4,), [b"12", b"345"], r"came with 5"),
        ("U8", (0,), [b"1"], r"came with 1"),
    ]:
        fails(tmp_path / "c", broken(dtype, shape, produced), message, max_shard_bytes=shard)


def test_bad_plans(tmp_path: Path) -> None:
    fails(tmp_path / "c", [good(), good()], "'good' is to be written twice")
    fails(tmp_path / "c", [good("__metadata__")], "'__metadata__' cannot be the key")
    fails(tmp_path / "c", [good("")], "'' cannot be the key")
    fails(
        tmp_path / "c", [TensorEntry("k", torch.complex128, (1,), lambda: torch.ones(1))], "complex128 cannot be stored"
    )
    fails(tmp_path / "c", [good()], "max_shard_bytes must be at least 1", max_shard_bytes=0)


def test_an_exception_while_producing_passes_through(tmp_path: Path) -> None:
    def produce() -> Iterator[bytes]:
        yield b"1"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, [good(), TensorEntry("k", "U8", (2,), produce)], max_shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_weights_of_two_checkpoints_never_share_a_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [good()])
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"already holds model\.safetensors"):
        write_checkpoint(tmp_path, [good("other")], max_shard_bytes=1)
    assert names_in(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_full_disk_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40 - 2**30, 2**30))
    big = TensorEntry("w", torch.float32, (2**28, 3), lambda: pytest.fail("nothing may be produced"))
    fails(tmp_path / "c", [big], r"needs 3\.000 GiB and 1\.000 GiB are free")


def test_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    """A limit on the size of files gives the same kind of error from the system as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        fails(
            tmp_path / "c", [good(), tensor_entry("big", torch.zeros(2**20))], r"model\.safetensors: cannot be written"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be made"):
        write_checkpoint(tmp_path / "file" / "c", [good()])
