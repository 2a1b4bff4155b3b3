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
    SpreadUnit,
    StateDictAdapter,
    Unit,
    dtype_name,
    tensor_entry,
    write_checkpoint,
)
from automimo.checkpoint.export_plan import ExportPlan, assign_writers, plan_export
from automimo.checkpoint.mixin import Layout
from automimo.distributed.gather import Spread
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


def spread_unit(key: str, rows: int, *holders: tuple[int, ...]) -> SpreadUnit:
    """A matrix of `rows` x 4 that each of `holders` has, in equal parts."""
    parts = len(holders[0])
    spread = Spread((rows, 4), torch.float32, 0, (rows // parts,) * parts, holders, None, None)
    return SpreadUnit((PlannedTensor(key, "F32", (rows, 4)),), (spread,), lambda values: values)


def expert_parallel_plan(max_shard_bytes: int = 10**9) -> ExportPlan:
    """4 ranks, ep 2 x ep_shard 2: 24 experts, 10 dense matrices in two replicas, one small matrix on all ranks, and two
    tensors that are carried."""
    experts = [spread_unit(f"e{i}", 64, (0, 2) if i < 12 else (1, 3)) for i in range(24)]
    dense = [spread_unit(f"d{i}", 8 * (i + 1), (0, 1), (2, 3)) for i in range(10)]
    sink = spread_unit("sink", 4, (0,), (1,), (2,), (3,))
    carried = [Unit((PlannedTensor(f"c{i}", "F32", (100, 4)),), list, 0) for i in range(2)]
    return plan_export(FolderContents([*dense, sink, *experts, *carried], {}), 4, max_shard_bytes)


def test_units_are_shared_out_evenly_to_ranks_that_have_a_part() -> None:
    plan = expert_parallel_plan()
    sizes = [sum(unit.nbytes for unit in share) for share in plan.shares]
    assert max(sizes) / (sum(sizes) / 4) <= 1.3 and len(plan.shares) == 4
    written = [{tensor.key for unit in share for tensor in unit.tensors} for share in plan.shares]
    assert sum(map(len, written)) == len(set().union(*written)) == 24 + 10 + 1 + 2
    for rank, keys in enumerate(written):
        assert {int(key[1:]) // 12 for key in keys if key[0] == "e"} == {rank % 2}
    assert [sum(key[0] == "e" for key in keys) for keys in written] == [6] * 4
    # 1000 rows that only rank 3 has leave the rest to the others.
    units = [spread_unit("x", 1000, (3,)), *(spread_unit(f"y{i}", 100, (0, 1, 2, 3)) for i in range(9))]
    assert sorted(assign_writers(units, 4)) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_every_unit_has_its_round_and_nobody_is_in_two_at_once() -> None:
    plan = expert_parallel_plan()
    for step in plan.rounds:
        busy = [member for entry in step for member in entry.holder]
        assert len(busy) == len(set(busy))
    for member, share in enumerate(plan.shares):
        rounds = [entry for step in range(len(plan.rounds)) if (entry := plan.round_of(step, member)) is not None]
        got = [unit for entry in rounds if (unit := entry.units[entry.holder.index(member)]) is not None]
        assert got == share[: plan.gathered[member]]  # in the order in which the writer takes them
        assert all(len(unit.inputs[0].holders[0]) > 1 for unit in got)
    # Replicas and sets of experts work side by side: all steps but the last ones have two rounds with two writers each.
    full = [len(step) == 2 and all(None not in entry.units for entry in step) for step in plan.rounds]
    assert full.count(False) <= 2
    assert len(plan.rounds) <= 12


def test_files_are_numbered_through_and_hold_the_shares() -> None:
    plan = expert_parallel_plan(max_shard_bytes=4096)
    names = [name for files in plan.files for name in files]
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    for share, files in zip(plan.shares, plan.files, strict=True):
        assert [key for keys in files.values() for key in keys] == [t.key for unit in share for t in unit.tensors]
        assert len(files) > 1
    alone = plan_export(FolderContents([spread_unit("x", 8, (0, 1))], {}), 2, 10**6)
    assert [list(files) for files in alone.files] == [["model.safetensors"], []]


def test_units_that_no_rank_can_make_are_refused() -> None:
    first, second = spread_unit("x", 8, (0, 1)), spread_unit("y", 8, (2, 3))
    both = SpreadUnit(first.tensors, (*first.inputs, *second.inputs), lambda values: values)
    with pytest.raises(CheckpointError, match=r"\['x'\]: no rank has a part"):
        plan_export(FolderContents([both], {}), 4, 10**6)
    with pytest.raises(CheckpointError, match="'x' is to be written twice"):
        plan_export(FolderContents([first, first], {}), 4, 10**6)


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
