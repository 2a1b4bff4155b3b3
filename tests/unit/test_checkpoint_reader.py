"""Checkpoint folders: layouts, indices that lie, links that lead out, and reading parts of tensors."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

from automimo.checkpoint import CheckpointReader, tensor_entry, write_checkpoint
from automimo.checkpoint.tensor_reader import row_chunks
from automimo.errors import CheckpointError

A = torch.arange(12, dtype=torch.float32).reshape(4, 3)
B = torch.arange(5, dtype=torch.int64)


def shards(folder: Path, weight_map: dict[str, Any] | None = None, **extra: Any) -> Path:
    """`a` in x.safetensors, `b` in y.safetensors and an index over both."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": A}, folder / "x.safetensors")
    save_file({"b": B}, folder / "y.safetensors")
    write_index(folder, {"a": "x.safetensors", "b": "y.safetensors"} if weight_map is None else weight_map, **extra)
    return folder


def write_index(folder: Path, weight_map: Any, **extra: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, **extra}))


def assert_holds_a_and_b(folder: Path) -> None:
    with CheckpointReader(folder) as reader:
        assert reader.tensors.keys() == {"a", "b"}
        assert torch.equal(reader.read("a"), A)
        assert torch.equal(reader.read("b"), B)


def refuses(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(folder)


# Layouts


def test_single_file(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors", metadata={"format": "pt", "tp_size": "4"})
    assert_holds_a_and_b(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        assert (reader.files, reader.metadata) == (("model.safetensors",), {"tp_size": "4"})


def test_shards_with_odd_names_and_metadata(tmp_path: Path) -> None:
    shards(tmp_path, metadata={"total_size": 88, "tp_size": 4})
    assert_holds_a_and_b(tmp_path)
    with CheckpointReader(str(tmp_path)) as reader:
        assert reader.files == ("x.safetensors", "y.safetensors")
        assert reader.metadata == {"total_size": 88, "tp_size": 4}


def test_index_as_the_hub_library_writes_it(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": torch.randn(64, 16) for i in range(6)}
    save_torch_state_dict(state, tmp_path, max_shard_size="9KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with CheckpointReader(tmp_path) as reader:
        assert len(reader.files) == 3
        assert reader.metadata["total_size"] == 6 * 4096
        assert all(torch.equal(reader.read(key), tensor) for key, tensor in state.items())
        assert reader.tensors.keys() == state.keys()


def test_index_over_a_single_model_file(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"a": "model.safetensors", "b": "model.safetensors"})
    assert_holds_a_and_b(tmp_path)


def test_index_beside_a_single_file_wins_only_when_both_list_the_same(tmp_path: Path) -> None:
    shards(tmp_path)
    save_file({"a": A + 1, "b": B}, tmp_path / "model.safetensors")
    assert_holds_a_and_b(tmp_path)
    save_file({"a": A, "b": B, "c": B + 1}, tmp_path / "model.safetensors")
    refuses(tmp_path, r"holds model\.safetensors\.index\.json and a model\.safetensors .*'c'")
    save_file({"a": A.to(torch.bfloat16), "b": B}, tmp_path / "model.safetensors")
    refuses(tmp_path, r"1 differ, such as 'a'")


def test_no_folder_no_weights_only_pickles(tmp_path: Path) -> None:
    refuses(tmp_path / "absent", "no such folder")
    refuses(tmp_path, "neither model.safetensors nor model.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refuses(tmp_path, r"pytorch_model\.bin is a pickle and is never opened")


# Indices that lie


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "no weight_map"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": ["a"]}', "no weight_map"),
        ('{"weight_map": {"a": 1}}', "map each key to a file name"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
        ('{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}, "metadata": 3}', "metadata is not"),
    ],
)
def test_malformed_index(tmp_path: Path, text: str, message: str) -> None:
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refuses(tmp_path, r"model\.safetensors\.index\.json: .*" + message)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", ".", "", "a\\b", "x\0y", "./x.safetensors"],
)
def test_index_names_that_are_no_plain_file_names(tmp_path: Path, name: str) -> None:
    save_file({"a": A}, tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    shards(folder)
    (folder / "sub").mkdir()
    save_file({"a": A}, folder / "sub" / "x.safetensors")
    write_index(folder, {"a": name, "b": "y.safetensors"})
    refuses(folder, "is not a plain file name")


def test_absolute_name_in_the_index(tmp_path: Path) -> None:
    shards(tmp_path / "m")
    write_index(tmp_path / "m", {"a": str(tmp_path / "m" / "x.safetensors"), "b": "y.safetensors"})
    refuses(tmp_path / "m", "is not a plain file name")


def test_key_of_the_index_in_no_shard(tmp_path: Path) -> None:
    refuses(shards(tmp_path, {"a": "x.safetensors", "b": "y.safetensors", "c": "x.safetensors"}), "no shard:\n.*c in x")


def test_key_of_a_shard_not_in_the_index(tmp_path: Path) -> None:
    shards(tmp_path)
    save_file({"a": A, "model.mtp.w": B}, tmp_path / "x.safetensors")
    refuses(tmp_path, r"1 tensors of the shards are not in the index:\n.*model\.mtp\.w in x\.safetensors")


def test_key_in_two_shards(tmp_path: Path) -> None:
    shards(tmp_path)
    save_file({"b": B, "a": A + 1}, tmp_path / "y.safetensors")
    refuses(tmp_path, r"stored twice:\n.*a in x\.safetensors and y\.safetensors")


def test_key_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    refuses(shards(tmp_path, {"a": "y.safetensors", "b": "x.safetensors"}), "index says y.safetensors, it is in x")


def test_missing_and_damaged_shards(tmp_path: Path) -> None:
    shards(tmp_path)
    good = (tmp_path / "y.safetensors").read_bytes()
    (tmp_path / "y.safetensors").write_bytes(good[:-3])
    refuses(tmp_path, r"y\.safetensors: truncated, 3 bytes are missing")
    (tmp_path / "y.safetensors").unlink()
    refuses(tmp_path, r"y\.safetensors: .*the folder is incomplete")


# Links and things that are no files


def test_links_inside_the_folder_and_to_the_folder_are_followed(tmp_path: Path) -> None:
    folder = shards(tmp_path / "real")
    (folder / "x.safetensors").rename(folder / "stored.safetensors")
    (folder / "x.safetensors").symlink_to("stored.safetensors")
    (tmp_path / "link").symlink_to("real")
    assert_holds_a_and_b(tmp_path / "link")


@pytest.mark.parametrize("name", ["x.safetensors", "model.safetensors.index.json"])
def test_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = shards(tmp_path / "m")
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    refuses(folder, rf"{name}: links to .*outside, outside the folder")


def test_dangling_and_circular_links(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    (folder / "x.safetensors").unlink()
    (folder / "x.safetensors").symlink_to("nowhere")
    refuses(folder, r"x\.safetensors: a link to nothing")
    (folder / "x.safetensors").unlink()
    (folder / "x.safetensors").symlink_to("x.safetensors")
    refuses(folder, r"x\.safetensors: a link to nothing")


def test_pipe_and_folder_instead_of_a_shard(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    (folder / "x.safetensors").unlink()
    os.mkfifo(folder / "x.safetensors")
    refuses(folder, r"x\.safetensors: not a regular file")
    (folder / "x.safetensors").unlink()
    (folder / "x.safetensors").mkdir()
    refuses(folder, r"x\.safetensors: not a regular file")


def hub_cache(root: Path) -> Path:
    """The layout of the Hugging Face cache: REPO/snapshots/REVISION/NAME -> ../../blobs/HASH."""
    repo = root / "models--org--name"
    snapshot = shards(repo / "snapshots" / "0123abcd")
    (repo / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(repo / "blobs" / f"hash{number}")
        path.symlink_to(Path("../../blobs") / f"hash{number}")
    return snapshot


def test_hub_cache_layout_is_read(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    assert_holds_a_and_b(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    assert_holds_a_and_b(tmp_path / "link")


def test_hub_cache_layout_allows_no_other_target(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    blob = (snapshot / "x.safetensors").resolve()
    for place in (
        blob.parent.parent / "stolen",
        blob.parent / "deeper" / "hash",
        tmp_path / "other" / "blobs" / "hash",
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        blob.rename(place)
        (snapshot / "x.safetensors").unlink()
        (snapshot / "x.safetensors").symlink_to(place)
        refuses(snapshot, "outside the folder")
        blob = place


# Reading


@pytest.fixture
def reader(tmp_path: Path) -> Any:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "f32": torch.randn(9, 4, 5, generator=generator),
        "bf16": torch.randn(7, 6, generator=generator).to(torch.bfloat16),
        "f8": torch.randn(6, 4, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "hollow": torch.empty(3, 0),
        "u8": torch.arange(256, dtype=torch.uint8),
    }
    write_checkpoint(
        tmp_path / "c", [tensor_entry(key, tensor) for key, tensor in tensors.items()], max_shard_bytes=500
    )
    with CheckpointReader(tmp_path / "c") as opened:
        yield opened, tensors


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_read_rows_equals_slicing(reader: Any) -> None:
    opened, tensors = reader
    for key in ("f32", "bf16", "f8", "u8", "hollow", "empty"):
        rows = tensors[key].shape[0]
        for start in range(rows + 1 if rows < 20 else 1):
            for stop in range(start, rows + 1):
                part = opened.read_rows(key, start, stop)
                assert part.shape == (stop - start, *tensors[key].shape[1:])
                assert bits(part) == bits(tensors[key].view(torch.uint8)[start:stop])


def test_read_rows_reads_only_their_bytes(tmp_path: Path) -> None:
    """The bytes of all other rows may vanish after the header was read."""
    write_checkpoint(tmp_path, [tensor_entry("w", torch.arange(1000, dtype=torch.int32).reshape(100, 10))])
    with CheckpointReader(tmp_path) as opened:
        os.truncate(tmp_path / "model.safetensors", opened.tensors["w"].begin + 50 * 40)
        assert opened.read_rows("w", 20, 50)[-1].tolist() == list(range(490, 500))
        with pytest.raises(CheckpointError, match="became shorter while tensor 'w' was read"):
            opened.read_rows("w", 49, 51)


@pytest.mark.parametrize(("key", "start", "stop"), [("bf16", -1, 2), ("bf16", 3, 2), ("bf16", 0, 8), ("scalar", 0, 1)])
def test_read_rows_outside_the_tensor(reader: Any, key: str, start: int, stop: int) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}'"):
        reader[0].read_rows(key, start, stop)


@pytest.mark.parametrize("chunk", [1, 8, 24, 100, 2**24])
def test_read_into_any_strides_and_dtypes(reader: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one element up to more than the tensor."""
    monkeypatch.setattr("automimo.checkpoint.tensor_reader.CHUNK_BYTES", chunk)
    opened, tensors = reader
    for key, tensor in tensors.items():
        straight = torch.zeros_like(tensor)
        opened.read_into(key, straight)
        assert bits(straight) == bits(tensor)
        reversed_strides = torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).permute(tuple(range(tensor.ndim))[::-1])
        opened.read_into(key, reversed_strides)
        assert bits(reversed_strides) == bits(tensor)
    for key in ("f32", "bf16", "scalar"):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            destination = torch.zeros(tensors[key].shape, dtype=dtype)
            opened.read_into(key, destination)
            assert torch.equal(destination, tensors[key].to(dtype))


def test_read_into_a_view_changes_nothing_else_and_takes_parameters(reader: Any) -> None:
    opened, tensors = reader
    stacked = torch.full((3, 6, 7), 9.0)
    opened.read_into("bf16", stacked[1].T)
    assert torch.equal(stacked[1].T, tensors["bf16"].float())
    assert stacked[0].eq(9).all()
    assert stacked[2].eq(9).all()
    parameter = torch.nn.Parameter(torch.zeros(9, 4, 5))
    opened.read_into("f32", parameter)
    assert torch.equal(parameter.detach(), tensors["f32"])
    assert parameter.requires_grad
    assert parameter.grad_fn is None


def test_read_into_refuses_what_would_be_wrong(reader: Any) -> None:
    opened, _ = reader
    with pytest.raises(CheckpointError, match=r"'f8' is stored as F8_E4M3 .*torch\.bfloat16.*decoded"):
        opened.read_into("f8", torch.zeros(6, 4, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"'f32' is stored as F32 .*torch\.int32"):
        opened.read_into("f32", torch.zeros(9, 4, 5, dtype=torch.int32))
    with pytest.raises(CheckpointError, match=r"'bf16' has shape \[7, 6\], its destination \[6, 7\]"):
        opened.read_into("bf16", torch.zeros(6, 7))
    with pytest.raises(CheckpointError, match="meta device"):
        opened.read_into("bf16", torch.zeros(7, 6, device="meta"))


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_iter_bytes_is_the_stored_bytes(reader: Any, chunk: int) -> None:
    opened, tensors = reader
    for key, tensor in tensors.items():
        pieces = [bytes(piece) for piece in opened.iter_bytes(key, chunk)]
        assert b"".join(pieces) == bits(tensor)
        assert all(len(piece) == chunk for piece in pieces[:-1])


def test_unknown_key_and_closed_reader(reader: Any) -> None:
    opened, _ = reader
    with pytest.raises(CheckpointError, match="no tensor 'nope' among its 7"):
        opened.read("nope")
    opened.close()
    with pytest.raises(CheckpointError, match="the reader is closed"):
        opened.read("f32")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_are_closed_and_few_are_open(tmp_path: Path) -> None:
    """150 shards are read with at most 64 files open, and none after the end."""
    tensors = [tensor_entry(f"k{i}", torch.full((4,), float(i))) for i in range(150)]
    write_checkpoint(tmp_path, tensors, max_shard_bytes=16)
    before = open_files()
    with CheckpointReader(tmp_path) as opened:
        assert len(opened.files) == 150
        for i in range(150):
            assert opened.read(f"k{i}").tolist() == [i] * 4
            assert open_files() <= before + 64
    assert open_files() == before


def test_threads_share_a_reader(tmp_path: Path) -> None:
    count = 130
    entries = [tensor_entry(f"k{i}", torch.full((64,), float(i))) for i in range(count)]
    write_checkpoint(tmp_path, entries, max_shard_bytes=256)
    wrong: list[int] = []
    with CheckpointReader(tmp_path) as opened:

        def work(offset: int) -> None:
            wrong.extend(i for i in range(count) if opened.read(f"k{(i + offset) % count}")[63] != (i + offset) % count)

        threads = [threading.Thread(target=work, args=(37 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 0, 2), (5, 3), (2, 3, 4), (1, 1, 9)])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 1000])
def test_row_chunks_cover_in_order(shape: tuple[int, ...], limit: int) -> None:
    count = int(torch.Size(shape).numel())
    tensor = torch.arange(count).reshape(shape)
    pieces = list(row_chunks(shape, limit))
    assert [x for index, _ in pieces for x in tensor[index].reshape(-1).tolist()] == list(range(count))
    assert all(tensor[index].shape == piece and 0 < tensor[index].numel() <= limit for index, piece in pieces)
