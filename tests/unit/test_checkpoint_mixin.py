"""`save_pretrained` through a small model that knows only the two methods of the protocol; the adapter base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from automimo.checkpoint import (
    CheckpointReader,
    FolderContents,
    HFCheckpointingMixin,
    PlannedTensor,
    StateDictAdapter,
    Unit,
    dtype_name,
    tensor_entry,
    write_checkpoint,
)
from automimo.checkpoint.mixin import Layout
from automimo.errors import CheckpointError


class Model(HFCheckpointingMixin, nn.Module):
    """Trains `w`, carries every key below `mtp.` from the source."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(6.0).reshape(2, 3))

    def folder_contents(
        self, source: CheckpointReader | None, dtype: torch.dtype | None, layout: Layout
    ) -> FolderContents:
        stored = dtype or self.w.dtype
        units = [Unit((PlannedTensor("w", dtype_name(stored), (2, 3)),), lambda: [self.w.to(stored)], 0)]
        if source is not None:
            units += [unit_of(source, key) for key in source.tensors if key.startswith("mtp.")]
        return FolderContents(units, {"from": "source"} if layout == "source" else {})

    def write_config(self, folder: Path, source: Path | None, dtype: torch.dtype | None, layout: Layout) -> None:
        (folder / "config.json").write_text(json.dumps({"dtype": str(dtype or self.w.dtype)}))


def unit_of(reader: CheckpointReader, key: str) -> Unit:
    info = reader.info(key)
    return Unit((PlannedTensor(key, info.dtype, info.shape),), lambda: [reader.iter_bytes(key)], info.nbytes)


class Tokenizer:
    def save_pretrained(self, save_directory: str, /) -> None:
        (Path(save_directory) / "tokenizer.json").write_text("new")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    mtp = torch.randint(0, 256, (40,), dtype=torch.uint8).view(torch.float8_e4m3fn)
    write_checkpoint(folder, [tensor_entry("w", torch.zeros(2, 3)), tensor_entry("mtp.x", mtp)], max_shard_bytes=30)
    for name, text in [("config.json", "{}"), ("tokenizer.json", "old"), ("dflash/model.safetensors", "other")]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_own_tensors_without_a_source(tmp_path: Path) -> None:
    Model().save_pretrained(tmp_path / "out")
    assert names_in(tmp_path / "out") == ["config.json", "model.safetensors"]
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.read("w").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_carries_tensors_and_side_files_of_the_source(tmp_path: Path, source: Path) -> None:
    Model().save_pretrained(str(tmp_path / "out"), source=source, dtype=torch.bfloat16)
    assert names_in(tmp_path / "out") == [
        "config.json",
        "dflash/model.safetensors",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "torch.bfloat16"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "old"
    with CheckpointReader(tmp_path / "out") as out, CheckpointReader(source) as original:
        assert out.tensors["w"].dtype == "BF16"
        assert out.tensors["mtp.x"].dtype == "F8_E4M3"
        assert b"".join(map(bytes, out.iter_bytes("mtp.x"))) == b"".join(map(bytes, original.iter_bytes("mtp.x")))


def test_the_layout_of_the_source(tmp_path: Path, source: Path) -> None:
    Model().save_pretrained(tmp_path / "out", source=source, layout="source")
    with CheckpointReader(tmp_path / "out") as out:
        assert out.metadata == {"from": "source", "total_size": 24 + 40}
    for wrong in ({"layout": "source"}, {"layout": "source", "source": source, "dtype": torch.bfloat16}):
        with pytest.raises(CheckpointError, match="give source, no dtype"):
            Model().save_pretrained(tmp_path / "other", **wrong)
    assert not (tmp_path / "other").exists()


def test_a_tokenizer_wins_over_that_of_the_source(tmp_path: Path, source: Path) -> None:
    Model().save_pretrained(tmp_path / "out", tokenizer=Tokenizer(), source=source)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "new"


def test_replacing_the_source_by_itself(tmp_path: Path, source: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        Model().save_pretrained(source, source=source)
    with CheckpointReader(source) as reader:
        before = b"".join(map(bytes, reader.iter_bytes("mtp.x")))
    Model().save_pretrained(source, source=source, replace=True, max_shard_bytes=30)
    with CheckpointReader(source) as reader:
        assert reader.read("w").sum() == 15
        assert b"".join(map(bytes, reader.iter_bytes("mtp.x"))) == before
    assert (source / "dflash" / "model.safetensors").read_text() == "other"
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_failure_leaves_nothing(tmp_path: Path, source: Path) -> None:
    (source / "leak").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="leak"):
        Model().save_pretrained(tmp_path / "out", source=source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_checkpointer_is_called_instead(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    class Recorder:
        def save_model(self, **arguments: Any) -> None:
            calls.append(arguments)

    model, tokenizer = Model(), Tokenizer()
    model.save_pretrained(tmp_path / "out", Recorder(), tokenizer, peft_config={"rank": 8})  # type: ignore[arg-type]
    expected = {"weights_path": str(tmp_path / "out"), "peft_config": {"rank": 8}, "tokenizer": tokenizer}
    assert calls == [{"model": model, **expected}]
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_the_protocol_cannot_be_made_and_unknown_options_are_errors(tmp_path: Path) -> None:
    class Incomplete(HFCheckpointingMixin, nn.Module):
        pass

    with pytest.raises(TypeError, match="folder_contents"):
        Incomplete()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="safe_serialisation"):
        Model().save_pretrained(tmp_path / "out", safe_serialisation=True)  # type: ignore[call-arg]


def test_the_mixin_leaves_the_module_as_it_is() -> None:
    model = Model()
    assert list(model.state_dict()) == ["w"]
    wrapped = type("Wrapped", (Model,), {})()  # as FSDP2 makes its classes
    assert list(wrapped.state_dict()) == ["w"]


class Halves(StateDictAdapter):
    """Native `x` is stored as `x.top` and `x.bottom`."""

    def to_hf(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return dict(
            pair for fqn, tensor in state_dict.items() for pair in self.convert_single_tensor_to_hf(fqn, tensor)
        )

    def from_hf(self, hf_state_dict: dict[str, Any], device_mesh: Any = None, **kwargs: Any) -> dict[str, Any]:
        names = [key.removesuffix(".top") for key in hf_state_dict if key.endswith(".top")]
        return {name: torch.cat([hf_state_dict[f"{name}.top"], hf_state_dict[f"{name}.bottom"]]) for name in names}

    def convert_single_tensor_to_hf(self, fqn: str, tensor: Any, **kwargs: Any) -> list[tuple[str, Any]]:
        top, bottom = tensor.chunk(2)
        return [(f"{fqn}.top", top), (f"{fqn}.bottom", bottom)]

    @property
    def supports_write_through_checkpoint_load(self) -> bool:
        return True


def test_adapter_base() -> None:
    native = {"x": torch.arange(4.0), "y": torch.arange(6.0)}
    adapter = Halves()
    assert adapter.get_hf_state_dict_keys(native) == ["x.top", "x.bottom", "y.top", "y.bottom"]
    back = adapter.from_hf(adapter.to_hf(native))
    assert back.keys() == native.keys()
    assert all(torch.equal(back[key], native[key]) for key in native)
    assert adapter.supports_write_through_checkpoint_load
    with pytest.raises(TypeError, match="abstract"):
        StateDictAdapter()  # type: ignore[abstract]
