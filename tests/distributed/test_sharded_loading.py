"""Checkpoints of every form straight into the shards: the bits of a whole model, and few bytes read per rank."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailedError, run_ranks
from released_folders import released
from released_forms import options_of
from released_oracle import FLASH, TP2, Shape
from safetensors.torch import load_file, save_file
from tiny_text import tiny_config, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from automimo.checkpoint import CheckpointReader, TensorInfo
from automimo.checkpoint.tensor_reader import TensorReader
from automimo.distributed.mesh import build_meshes, infer_sizes
from automimo.errors import CheckpointError, DistributedError
from automimo.mimo_v2_flash import sharded_weights
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, model_class_of
from automimo.mimo_v2_flash.storage import StoredCheckpoint, decode
from automimo.mimo_v2_flash.storage.matrices import StoredMatrix
from automimo.mimo_v2_flash.weights import check_weights, checkpoint_places, is_carried, load_weights
from automimo.moe import expert_load
from automimo.parallelize import ParallelConfig, parallelize

# 160 columns are no multiple of 128; 10 experts and 160 columns are no multiple of 3.
UNEVEN = replace(FLASH, n_routed_experts=10, mtp_layers=1)
FORMS: dict[str, tuple[Shape, str]] = {
    "bf16-fused": (FLASH, "bf16-fused"),
    "fp8-split-plain": (TP2, "fp8-split-plain"),
    "fp8-flash": (FLASH, "fp8-flash"),
    "fp8-fused": (FLASH, "fp8-fused"),
    "mxfp4-fused": (FLASH, "mxfp4-fused"),
    "uneven": (UNEVEN, "fp8-fused"),
}
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {"dp": {}, "ep2": {"expert": 2}},
    3: {"dp": {}},
    4: {"dp": {}, "hsdp": {"replicate": 2}, "ep4": {"expert": 4}, "ep2 x ep_shard2": {"expert": 2}},
}
# What one element takes in a file, without its FP8 scales: for those is the tenth that may be read on top.
CODE_BYTES = {"fp8": 1.0, "mxfp4": 0.5 + 1 / 32}
STORED_BYTES = {"F32": 4, "BF16": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("released")
    for name, (shape, form) in FORMS.items():
        released(root / name, shape, form, shards=3, side_files=False)
    tiny_model(tiny_config(n_routed_experts=8)).save_pretrained(root / "fp32")
    return {path.name: path for path in root.iterdir()}


# -- what runs on the ranks -------------------------------------------------------------------------------------------


def opened(name: str, reader: CheckpointReader, model: MiMoV2FlashForCausalLM) -> StoredCheckpoint:
    options = options_of(*FORMS[name]) if name in FORMS else None
    return StoredCheckpoint(reader, model.config, options)


def bare_shard(folder: Path, mesh: dict[str, int], dtype: torch.dtype = torch.float32) -> MiMoV2FlashForCausalLM:
    """A rank's part with NaN in all its memory."""
    with torch.device("meta"):
        model = model_class_of(folder).from_pretrained(str(folder), load_weights=False, dtype=dtype)
    experts = model.config.n_routed_experts
    sizes = infer_sizes(dist.get_world_size(), n_experts=experts, **mesh)
    parallelize(model, build_meshes(sizes, "cpu"), ParallelConfig())
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(torch.nan)
    return model


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Counted:
    """A reader's bytes while this is open, counted where every read ends."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> "Counted":
        self._fill = TensorReader._fill

        def counting(reader: TensorReader, info: TensorInfo, offset: int, buffer: Tensor) -> None:
            self.bytes += buffer.nbytes
            self._fill(reader, info, offset, buffer)

        TensorReader._fill = counting  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        TensorReader._fill = self._fill  # type: ignore[method-assign]


def kept_bytes(model: MiMoV2FlashForCausalLM, source: StoredCheckpoint) -> float:
    """Bytes of the file that hold the elements of this rank: of every parameter the part of its elements."""

    def element_bytes(matrix: StoredMatrix) -> float:
        return CODE_BYTES.get(matrix.encoding) or STORED_BYTES[matrix.weight.dtype]

    state = model.state_dict()
    whole: dict[str, float] = dict.fromkeys(state, 0.0)
    for key, place in checkpoint_places(
        {name: torch.empty(t.shape, device="meta") for name, t in state.items()}
    ).items():
        matrix = source.matrices[key]
        whole[place.parameter] += element_bytes(matrix) * torch.Size(matrix.shape).numel()
    return sum(whole[name] * local(tensor).numel() / tensor.numel() for name, tensor in state.items())


def load_all(rank: int, folders: dict[str, Path], world: int) -> None:
    for name, folder in folders.items():
        with CheckpointReader(folder) as reader:
            plain = model_class_of(folder).from_pretrained(str(folder), load_weights=False, dtype=torch.float32)
            load_weights(plain, opened(name, reader, plain))
            for layout, mesh in LAYOUTS[world].items():
                model = bare_shard(folder, mesh)
                source = opened(name, reader, model)
                with Counted() as counted:
                    load_weights(model, source)
                assert counted.bytes <= 1.1 * kept_bytes(model, source), (name, layout)
                assert_same(model, plain, (name, layout))
                assert int(expert_load(model).abs().sum()) == 0
    # What FSDP gathers is the memory that was filled.
    ids = torch.arange(24)[None]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)


def assert_same(model: MiMoV2FlashForCausalLM, plain: MiMoV2FlashForCausalLM, what: Any) -> None:
    expected = plain.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for key, tensor in model.state_dict().items():
        assert bool(local(tensor).isfinite().all()), (what, key)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert whole.dtype == expected[key].dtype, (what, key)
        assert torch.equal(whole, expected[key]), (what, key)


def load_in_small_runs(rank: int, folders: dict[str, Path], world: int) -> None:
    """Exchanges and reads that begin and end anywhere, also inside of blocks of 128 rows and of several matrices."""
    sharded_weights.EXCHANGE_BYTES, decode.READ = 160 * 4 * 11, 160 * 13
    for name, folder in folders.items():
        for dtype in (torch.float32, torch.bfloat16):
            with CheckpointReader(folder) as reader:
                plain = model_class_of(folder).from_pretrained(str(folder), load_weights=False, dtype=dtype)
                load_weights(plain, opened(name, reader, plain))
                model = bare_shard(folder, {}, dtype)
                load_weights(model, opened(name, reader, model))
                assert_same(model, plain, (name, dtype))


# -- equal to one process, and few bytes ------------------------------------------------------------------------------


FAST = ("bf16-fused", "fp8-fused", "mxfp4-fused", "fp32")


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, FAST),
        (3, ("uneven",)),
        pytest.param(4, ("fp8-fused", "mxfp4-fused"), marks=pytest.mark.slow),
        pytest.param(4, ("bf16-fused", "fp32"), marks=pytest.mark.slow),
        pytest.param(2, ("fp8-split-plain", "fp8-flash"), marks=pytest.mark.slow),
        pytest.param(4, ("fp8-split-plain", "fp8-flash"), marks=pytest.mark.slow),
    ],
)
def test_every_form_in_every_layout_has_the_bits_of_a_whole_model(
    world: int, names: tuple[str, ...], folders: dict[str, Path]
) -> None:
    run_ranks(world, load_all, {name: folders[name] for name in names}, world)


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ("fp8-fused",)),
        pytest.param(2, ("bf16-fused", "mxfp4-fused"), marks=pytest.mark.slow),
        pytest.param(3, ("uneven",), marks=pytest.mark.slow),
    ],
)
def test_runs_and_pieces_may_begin_anywhere(world: int, names: tuple[str, ...], folders: dict[str, Path]) -> None:
    run_ranks(world, load_in_small_runs, {name: folders[name] for name in names}, world)


# (world, rank in it, mesh): one rank each, the others do not exist and what they send is not there.
FAR = [
    (64, 21, {"expert": 4}),  # 3 experts, cut among 16 ranks
    (64, 63, {"expert": 4, "replicate": 2}),
    (512, 0, {}),  # 6 rows of q; 12 experts for 512 ranks, whole
    (512, 511, {}),
]


def read_as_one_of_many(process: int, folders: dict[str, Path]) -> list[float]:
    """Bytes read / bytes kept of the one rank FAR[process], for each folder."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world, rank, mesh = FAR[process]
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    ratios = []
    for name, folder in folders.items():
        model = bare_shard(folder, mesh)
        with CheckpointReader(folder) as reader:
            source = opened(name, reader, model)
            with Counted() as counted:
                load_weights(model, source)
            ratios.append(counted.bytes / kept_bytes(model, source))
    del model
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ratios


def test_a_rank_of_64_or_512_reads_what_it_keeps(folders: dict[str, Path]) -> None:
    names = ("bf16-fused", "fp8-fused", "mxfp4-fused")
    for ratios in run_ranks(len(FAR), read_as_one_of_many, {name: folders[name] for name in names}):
        assert len(ratios) == len(names)
        assert all(0.99 < ratio <= 1.1 for ratio in ratios), ratios


# -- memory -----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor that an operation returns, views of known memory apart."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.bytes = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and not result.is_meta and result.untyped_storage().data_ptr() not in self._known:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


def largest_temporary(rank: int, folders: dict[str, Path]) -> dict[str, tuple[int, int]]:
    sharded_weights.EXCHANGE_BYTES, decode.READ = 16 * 1024, 8 * 1024
    result = {}
    for name, folder in folders.items():
        model = bare_shard(folder, {})
        with CheckpointReader(folder) as reader:
            source = opened(name, reader, model)
            matrix = max(torch.Size(m.shape).numel() for m in source.matrices.values())
            with Largest([local(tensor) for tensor in model.state_dict().values()]) as largest:
                load_weights(model, source)
        result[name] = (largest.bytes, matrix)
    return result


def test_what_is_held_besides_the_shards_does_not_grow_with_the_matrices(folders: dict[str, Path]) -> None:
    names = ("bf16-fused", "fp8-fused")
    for result in run_ranks(2, largest_temporary, {name: folders[name] for name in names}):
        for name, (largest, matrix) in result.items():
            # decode_fp8 works on 128 rows of up to 384 columns in fp32, more than the 16 KiB of a buffer here.
            bound = 16 * 1024 if name == "bf16-fused" else 128 * 384 * 4
            assert 0 < largest <= bound, name
            assert matrix * 4 > 8 * bound  # as fp32, of which each rank keeps half


# -- failures ---------------------------------------------------------------------------------------------------------


def damaged(folder: Path, out: Path, key: str, row: int) -> Path:
    """A copy of `folder` with a NaN code in one row of a matrix."""
    shutil.copytree(folder, out)
    file = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"][key]
    tensors = load_file(out / file)
    tensors[key].view(torch.uint8)[row, 5] = 0x7F
    save_file(tensors, out / file, {"format": "pt"})
    return out


def load_one(rank: int, folder: Path, name: str, mesh: dict[str, int]) -> None:
    model = bare_shard(folder, mesh)
    with CheckpointReader(folder) as reader:
        load_weights(model, opened(name, reader, model))


EXPERT = "model.layers.1.mlp.experts.{}.gate_proj.weight"
QKV = "model.layers.2.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(
    ("world", "mesh", "key", "row", "mate"),
    [
        (2, {}, EXPERT.format(0), 0, 1),  # in the middle of an exchange
        (2, {}, QKV, 4351, 1),  # between two exchanges
        (2, {"expert": 2}, EXPERT.format(0), 0, 0),  # no exchanges: the other rank learns it in the end
        (4, {"expert": 2}, EXPERT.format(11), 95, 2),  # ranks 1 and 3 have experts 6..11, each half of the columns
    ],
)
def test_a_rank_that_cannot_read_names_key_and_file_and_nobody_hangs(
    world: int, mesh: dict[str, int], key: str, row: int, mate: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = damaged(folders["fp8-fused"], tmp_path / "damaged", key, row)
    with pytest.raises(RankFailedError) as error:
        run_ranks(world, load_one, folder, "fp8-fused", mesh)
    texts = dict(enumerate(str(error.value).split("--- rank ")[1:]))
    assert len(texts) == world
    assert "did not end in time" not in str(error.value)
    own = [rank for rank, text in texts.items() if "automimo.errors.CheckpointError" in text]
    assert len(own) == 1
    told = {own[0] ^ mate} - set(own)
    for rank in {*own, *told}:
        assert f"{key}: holds NaN codes" in texts[rank]
        assert ".safetensors: " in texts[rank].rsplit("Error: ", 1)[-1]
    for rank in told:
        assert f"automimo.errors.DistributedError: reading the weights: rank {own[0]} failed" in texts[rank]


def load_wrong_keys(rank: int, cases: list[tuple[list[Path], dict[str, int]]]) -> list[tuple[str, str, bool]]:
    """Of each case (folder of every rank, mesh): type and text of the error, and whether the memory is as it was."""
    result = []
    for shards, mesh in cases:
        model = bare_shard(shards[rank], mesh)
        with CheckpointReader(shards[rank]) as reader, pytest.raises((CheckpointError, DistributedError)) as error:
            load_weights(model, opened("fp32", reader, model))
        untouched = all(bool(local(tensor).isnan().all()) for tensor in model.state_dict().values())
        result.append((type(error.value).__name__, str(error.value), untouched))
    return result


def with_wrong_keys(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.experts.7.up_proj.weight"]
    tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = torch.ones(16, 32)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_wrong_keys_are_the_same_error_on_all_ranks_and_nothing_is_read(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    right, wrong = folders["fp32"], with_wrong_keys(folders["fp32"], tmp_path / "wrong")
    # What a plain model says.
    with CheckpointReader(wrong) as reader, pytest.raises(CheckpointError) as error:
        model = model_class_of(wrong).from_pretrained(str(wrong), load_weights=False)
        check_weights(model, opened("fp32", reader, model))
    for word in ("2 missing", "model.norm.weight", "experts.7.up_proj", "1 unexpected", "experts.8.up_proj"):
        assert word in str(error.value)
    own = ("CheckpointError", str(error.value), True)
    # The last: a rank that sees another folder.
    cases = [([wrong, wrong], {}), ([wrong, wrong], {"expert": 2}), ([right, wrong], {})]
    first, second = run_ranks(2, load_wrong_keys, cases)
    assert first[:2] == second[:2] == [own, own]
    assert second[2] == own
    kind, text, untouched = first[2]
    assert kind == "DistributedError"
    assert str(error.value) in text
    assert untouched


def refused(rank: int, folder: Path) -> list[str]:
    """Errors of a model on the meta device and of one that is sharded in another way."""
    from torch.distributed.tensor import Shard, distribute_tensor

    texts = []
    with torch.device("meta"):
        model = model_class_of(folder).from_pretrained(str(folder), load_weights=False)
    parallelize(model, build_meshes(infer_sizes(2, n_experts=8), "cpu"), ParallelConfig())
    with CheckpointReader(folder) as reader, pytest.raises(CheckpointError) as error:
        load_weights(model, opened("fp32", reader, model))
    texts.append(str(error.value))
    plain = model_class_of(folder).from_pretrained(str(folder), load_weights=False)
    mesh = dist.init_device_mesh("cpu", (2,))
    head = distribute_tensor(plain.lm_head.weight.data, mesh, [Shard(1)])
    plain.lm_head.weight = torch.nn.Parameter(head)
    with CheckpointReader(folder) as reader, pytest.raises(CheckpointError) as error:
        load_weights(plain, opened("fp32", reader, plain))
    return [*texts, str(error.value)]


def test_models_that_cannot_be_filled_are_refused(folders: dict[str, Path]) -> None:
    for meta, columns in run_ranks(2, refused, folders["fp32"]):
        assert "is on the meta device" in meta
        assert "lm_head.weight is sharded as (Shard(dim=1),)" in columns


def test_no_key_of_the_text_model_is_carried(folders: dict[str, Path]) -> None:
    """The byte counts above leave out what a text run does not read: make sure that this is MTP alone."""
    with CheckpointReader(folders["fp8-fused"]) as reader:
        model = model_class_of(folders["fp8-fused"]).from_pretrained(str(folders["fp8-fused"]), load_weights=False)
        carried = [key for key in opened("fp8-fused", reader, model).matrices if is_carried(key)]
    assert carried
    assert all(key.startswith("model.mtp.") for key in carried)
