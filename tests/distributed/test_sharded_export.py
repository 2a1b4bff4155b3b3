"""Hugging Face folders written by several ranks: the tensors of one process, bit for bit, or nothing at all."""

import json
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankFailedError, run_ranks
from released_folders import released
from released_oracle import FLASH, OMNI, TP2, Shape
from safetensors.torch import load_file
from tiny_folders import raw, tensors_of
from tiny_text import tiny_config, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from automimo.checkpoint import parallel_writer
from automimo.distributed import gather
from automimo.distributed.mesh import build_meshes, infer_sizes
from automimo.errors import AutoMiMoError, CheckpointError, DistributedError
from automimo.mimo_v2_flash import export
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, model_class_of
from automimo.parallelize import ParallelConfig, parallelize
from automimo.training.export import EXPORT_MARK, export_final
from automimo.training.precision import MasterWeights
from automimo.training.run_folder import RunFolder
from automimo.training.summary import model_size

FORMS: dict[str, tuple[Shape, str]] = {"fp8-fused": (TP2, "fp8-fused"), "mxfp4-fused": (OMNI, "mxfp4-fused")}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "source": {"layout": "source"},
}
CHANGED = ("embed_tokens", "layers.1.self_attn.k_proj", "layers.1.mlp.experts.gate_and_up", "layers.2.mlp.gate.weight")
# What to export in which layout, and in how many processes.
CASES: dict[str, tuple[int, list[tuple[str, dict[str, int], tuple[str, ...]]]]] = {
    "2": (2, [("fp8-fused", {}, ("fp32", "bf16", "source"))]),
    "4": (4, [("mxfp4-fused", {"expert": 2}, ("bf16", "source"))]),
    "small messages": (3, [("fp8-fused", {}, ("source",))]),
    "2, ep": (2, [("fp8-fused", {"expert": 2}, ("fp32", "source")), ("mxfp4-fused", {}, ("fp32", "source"))]),
    "4, hsdp and ep": (
        4,
        [("fp8-fused", {"replicate": 2}, ("fp32", "source")), ("mxfp4-fused", {"expert": 4}, ("source",))],
    ),
}
# Small enough that most ranks write several files.
SHARD = 2 * 10**6


def changed_model(folder: Path) -> MiMoV2FlashForCausalLM:
    """The model of a folder with half of the rows of some weights changed, and half of the experts of one layer."""
    model = model_class_of(folder).from_pretrained(str(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if any(part in name for part in CHANGED):
                tensor[: tensor.shape[0] // 2].mul_(1 + torch.rand(tensor.shape[-1], generator=generator))
    return model


def share(model: MiMoV2FlashForCausalLM, **mesh: int) -> MiMoV2FlashForCausalLM:
    sizes = infer_sizes(int(os.environ["WORLD_SIZE"]), n_experts=model.model.moe_config.n_routed_experts, **mesh)
    parallelize(model, build_meshes(sizes, "cpu"), ParallelConfig())
    return model


def others(folder: Path) -> dict[str, bytes]:
    """Everything of a folder but weights, index and config."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in files
        if path.parent != folder or not (".safetensors" in path.name or path.name == "config.json")
    }


def assert_same_folder(ours: Path, reference: Path) -> dict[str, list[str]]:
    """The same tensors, bit for bit, and the same other files; the index says what is where. Returns key by file."""
    expected, found = tensors_of(reference), tensors_of(ours)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert raw(found[key]) == raw(tensor), key
    index = json.loads((ours / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in ours.glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    keys = {name: sorted(load_file(ours / name)) for name in names}
    assert {key: name for name in names for key in keys[name]} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    reference_index = reference / "model.safetensors.index.json"
    if reference_index.exists():
        assert index["metadata"] == json.loads(reference_index.read_text())["metadata"]
    assert others(ours) == others(reference)
    assert [path.name for path in ours.parent.iterdir() if path.name.startswith(".")] == []
    return keys


# ---------------------------------------------------------------- equality


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources and what one process exports of them: FORM/source, FORM/KIND."""
    root = tmp_path_factory.mktemp("references")
    for name, (shape, form) in FORMS.items():
        released(root / name / "from", shape, form, shards=2)
        model = changed_model(root / name / "from")
        for kind, options in KINDS.items():
            model.save_pretrained(root / name / kind, source=root / name / "from", max_shard_bytes=SHARD, **options)
    return root


def export_cases(rank: int, references: Path, out: Path, name: str) -> None:
    if name == "small messages":  # many for each tensor, with borders inside of rows and of q, k and v
        gather.SLAB_BYTES, gather._LEAST_MESSAGE = 9001, 3001
    for number, (form, mesh, kinds) in enumerate(CASES[name][1]):
        model = share(changed_model(references / form / "from"), **mesh)
        for kind in kinds:
            folder = out / f"{number}-{kind}"
            model.save_pretrained(folder, source=references / form / "from", max_shard_bytes=SHARD, **KINDS[kind])
            assert folder.is_dir()  # complete on every rank when the call returns


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if "," in n else []) for n in CASES])
def test_equals_the_export_of_one_process(references: Path, tmp_path: Path, name: str) -> None:
    size, cases = CASES[name]
    run_ranks(size, export_cases, references, tmp_path, name)
    for number, (form, _, kinds) in enumerate(cases):
        for kind in kinds:
            assert_same_folder(tmp_path / f"{number}-{kind}", references / form / kind)


def odd_model() -> MiMoV2FlashForCausalLM:
    """5 experts of 18 rows: on 4 ranks the router has uneven shards and an empty one, and so have the down stacks."""
    return tiny_model(tiny_config(n_routed_experts=5, moe_intermediate_size=18), moe={"n_activated_experts": 2})


def export_odd(rank: int, out: Path) -> None:
    for name, mesh in (("dp", {}), ("hsdp", {"replicate": 2})):
        share(odd_model(), **mesh).save_pretrained(out / name)


def test_uneven_and_empty_shards_and_the_class_in_config_json(tmp_path: Path) -> None:
    odd_model().save_pretrained(tmp_path / "reference")
    run_ranks(4, export_odd, tmp_path)
    for name in ("dp", "hsdp"):
        assert_same_folder(tmp_path / name, tmp_path / "reference")
        # FSDP gives the model another class, whose name must not get into the folder.
        assert (tmp_path / name / "config.json").read_bytes() == (tmp_path / "reference/config.json").read_bytes()


# ---------------------------------------------------------------- failures


def old_folder(path: Path) -> dict[str, bytes]:
    tiny_model(seed=5).save_pretrained(path / "out")
    return {name.name: name.read_bytes() for name in (path / "out").iterdir()}


def assert_untouched(path: Path, before: dict[str, bytes]) -> None:
    assert {name.name: name.read_bytes() for name in (path / "out").iterdir()} == before
    assert [name.name for name in path.iterdir()] == ["out"]


def fail(rank: int, out: Path, how: str) -> str:
    """What each rank gets when something fails on rank 1 alone."""
    model = tiny_model()
    if how == "overflow":
        with torch.no_grad():
            model.model.norm.weight[3] = 1e6  # too large for float16; only its writer notices
    share(model, expert=2)
    if rank == 1 and how == "disk":

        def full(self: Any) -> None:
            raise CheckpointError(f"{self.path.name}: cannot be written: no space left")

        parallel_writer._File.start = full  # type: ignore[method-assign]
    if rank == 1 and how == "contents":
        model.folder_contents = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    if rank == 1 and how == "memory":

        def no_memory(*_: Any) -> None:
            raise MemoryError("cannot allocate")

        from automimo.checkpoint import collective_writer

        collective_writer._transfers = no_memory  # type: ignore[assignment]
    try:
        dtype = torch.float16 if how == "overflow" else None
        model.save_pretrained(out, dtype=dtype, replace=True)
    except (AutoMiMoError, ZeroDivisionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("how", "word"),
    [("disk", "no space left"), ("contents", "division"), ("memory", "cannot allocate"), ("overflow", "overflows")],
)
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path: Path, how: str, word: str) -> None:
    before = old_folder(tmp_path)
    heard = run_ranks(2, fail, tmp_path / "out", how, timeout=60)
    assert all(word in text for text in heard), heard
    kinds = [text.split(":")[0] for text in heard]
    assert kinds.count(DistributedError.__name__) == 1, heard
    assert_untouched(tmp_path, before)


def refuse(rank: int, out: Path) -> str:
    try:
        share(tiny_model()).save_pretrained(out)
    except AutoMiMoError as error:
        return str(error)
    return "nothing"


def test_an_existing_folder_is_refused_on_all_ranks(tmp_path: Path) -> None:
    before = old_folder(tmp_path)
    assert all("exists already" in text for text in run_ranks(2, refuse, tmp_path / "out"))
    assert_untouched(tmp_path, before)


def export_or_die(rank: int, out: Path, victim: int) -> None:
    model = share(tiny_model(), expert=2)
    cast, calls = export._cast, []

    def die(*arguments: Any) -> Tensor:
        calls.append(0)
        if rank == victim and len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return cast(*arguments)

    export._cast = die
    model.save_pretrained(out, replace=True)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_leaves_the_old_folder_and_no_junk_after_the_next_try(tmp_path: Path, victim: int) -> None:
    before = old_folder(tmp_path)
    with pytest.raises(RankFailedError, match="died without a word"):
        run_ranks(2, export_or_die, tmp_path / "out", victim, timeout=60)
    assert {name.name: name.read_bytes() for name in (tmp_path / "out").iterdir()} == before
    tiny_model().save_pretrained(tmp_path / "reference")
    run_ranks(2, export_or_die, tmp_path / "out", -1)
    assert_same_folder(tmp_path / "out", tmp_path / "reference")


# ---------------------------------------------------------------- balance and memory


class Watch(TorchDispatchMode):
    """Sizes of the memory of all tensors that operations make: the largest, and the most that is held at once."""

    def __init__(self, record: "Record") -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                self.record.add(tensor)
        return result


class Record:
    def __init__(self, known: list[Tensor]) -> None:
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}  # the shards themselves
        self.lock = threading.Lock()
        self.alive: list[weakref.ref[Tensor]] = []
        self.largest = self.most = 0

    def add(self, tensor: Tensor) -> None:
        with self.lock:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in self.known:
                return
            self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(tensor)]
            storages = [t.untyped_storage() for ref in self.alive if (t := ref()) is not None]
            held = {storage.data_ptr(): storage.nbytes() for storage in storages}
            self.largest = max(self.largest, storage.nbytes())
            self.most = max(self.most, sum(held.values()))


WIDE = {"hidden_size": 64, "moe_intermediate_size": 96, "n_routed_experts": 16}
LARGEST = 96 * 64 * 4  # a matrix of an expert in fp32; all dense ones are smaller
STACK = 16 * 2 * LARGEST


def export_watched(rank: int, out: Path) -> tuple[int, int]:
    model = share(tiny_model(tiny_config(**WIDE)), expert=2)
    record = Record([tensor.to_local() for tensor in model.parameters() if hasattr(tensor, "to_local")])
    run = parallel_writer._Worker.run

    def watched(self: Any) -> None:
        with Watch(record):
            run(self)

    parallel_writer._Worker.run = watched  # type: ignore[method-assign]
    with Watch(record):
        model.save_pretrained(out)
    return record.largest, record.most


def test_no_rank_holds_more_than_two_units_and_all_write_the_same_share(tmp_path: Path) -> None:
    model = tiny_model(tiny_config(**WIDE))
    model.save_pretrained(tmp_path / "reference")
    assert sum(tensor.nbytes for tensor in model.state_dict().values()) > 60 * LARGEST
    for largest, most in run_ranks(4, export_watched, tmp_path / "out"):
        assert LARGEST <= largest <= LARGEST + 4096  # one whole matrix, and never a stack
        # Two units; one of them transposed or encoded as well; parts on their way out, in the slab and received.
        assert most <= 7 * LARGEST < STACK / 4
    keys = assert_same_folder(tmp_path / "out", tmp_path / "reference")
    assert len(keys) == 4
    written = [(tmp_path / "out" / name).stat().st_size for name in keys]
    assert max(written) / (sum(written) / 4) <= 1.3, written
    # Experts are written by a rank that has them: ranks 0 and 2 have the first half.
    for name, half in zip(sorted(keys), (0, 1, 0, 1), strict=True):
        numbers = {int(key.split(".experts.")[1].split(".")[0]) for key in keys[name] if ".experts." in key}
        assert numbers == set(range(8 * half, 8 * half + 8)), name


# ---------------------------------------------------------------- the end of a run


def finish(rank: int, root: Path, source: Path) -> list[bool]:
    model = model_class_of(source).from_pretrained(str(source), dtype=torch.float32)
    size = model_size(model, [])
    share(model, expert=2)
    masters = MasterWeights(model, torch.float32)
    return [export_final(RunFolder(root), source, model, masters, size, step, "bf16") for step in (3, 3, 4)]


def test_export_final(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    released(source, FLASH, "fp8-flash")
    run.mkdir()
    lines = [
        {"step": step, "loss": 2.0 / step, "lr": 0.1, "tokens": 5, "grad_norm": 1.0, "seconds": 0.1}
        for step in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "recipe.yaml").write_text("model: {path: x}\ndata: {train: [], sequence_length: 8}\ntrain: {batch: 2}\n")
    assert run_ranks(2, finish, run, source) == [[True, False, True]] * 2
    model_class_of(source).from_pretrained(str(source), dtype=torch.float32).save_pretrained(
        tmp_path / "reference", dtype=torch.bfloat16
    )
    expected = tensors_of(tmp_path / "reference")
    found = tensors_of(run / "final")
    assert found.keys() == expected.keys()
    assert all(raw(found[key]) == raw(tensor) for key, tensor in expected.items())
    assert json.loads((run / "final" / EXPORT_MARK).read_text()) == {"step": 4, "dtype": "bf16"}
    assert "loss.png" in (run / "final" / "README.md").read_text() and (run / "final" / "loss.png").is_file()
    assert sorted(path.name for path in run.iterdir()) == ["final", "loss.png", "metrics.jsonl", "recipe.yaml"]
