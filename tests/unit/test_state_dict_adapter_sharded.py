"""The state-dict adapter on DTensors: experts over meshes, sharded projections, and what a mesh cannot hold.

The meshes of several ranks have torch's fake process group, which does nothing: each rank is played in turn, and no
step may need another one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from released_folders import built, values
from released_oracle import TP2, Shape
from test_state_dict_adapter_released import assert_holds, fill, model_for
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.state_dict_adapter import MiMoV2FlashStateDictAdapter
from automimo.moe import MoEConfig, MoESplitExpertsStateDictMixin

# Two ranks of ep_shard cut the columns of experts into whole groups of 32.
SHAPE: Shape = replace(TP2, hidden_size=64, moe_intermediate_size=64, mtp_layers=0)
EXPERTS = SHAPE.n_routed_experts
LAYERS = (1, 2)


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A real process group of one rank."""
    rendezvous = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        yield
    finally:
        dist.destroy_process_group()


def expert_mesh(shards: int, ep: int) -> DeviceMesh:
    return init_device_mesh("cpu", (shards, ep), mesh_dim_names=("ep_shard", "ep"))


def stacks_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.endswith("projs")}


def sharded(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    result = distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)
    assert isinstance(result, DTensor)
    return result


def filled(form: str) -> dict[str, Tensor]:
    """The state dict of a model with the decoded tensors of a form."""
    model = model_for(SHAPE, form)
    fill(model, built(SHAPE, form)[1])
    return dict(model.state_dict())


def part(tensor: Tensor, rank: int, shards: int, ep: int) -> Tensor:
    """What a rank has of a stack: experts by its place in ep, rows by its place in ep_shard."""
    return tensor.chunk(ep, 0)[rank % ep].chunk(shards, 1)[rank // ep]


@pytest.mark.parametrize(("shards", "ep"), [(1, 4), (2, 2), (2, 3), (4, 1)])
@pytest.mark.parametrize("form", ["bf16-split", "fp8-fused", "mxfp4-fused"])
def test_new_stacks_hold_the_experts_of_the_rank(form: str, shards: int, ep: int) -> None:
    stored, _ = built(SHAPE, form)
    reference = filled(form)
    for rank in range(shards * ep):
        with rank_of(rank, shards * ep):
            mesh = expert_mesh(shards, ep)
            model = model_for(SHAPE, form)
            result = model.state_dict_adapter.from_hf(stored, device_mesh=mesh)
            assert result.keys() == reference.keys()
            for name, tensor in result.items():
                if name in stacks_of(reference):
                    assert isinstance(tensor, DTensor)
                    assert tensor.shape == reference[name].shape
                    assert tensor.placements == ((Shard(1), Shard(0)) if shards > 1 else (Shard(0),))
                    assert torch.equal(tensor.to_local(), part(reference[name], rank, shards, ep)), name
                else:
                    assert not isinstance(tensor, DTensor)
                    assert torch.equal(tensor.float(), reference[name].float())


def test_a_mesh_may_have_other_dimensions_and_a_lone_one_any_name() -> None:
    stored, _ = built(SHAPE, "bf16-split")
    reference = stacks_of(filled("bf16-split"))
    with rank_of(2, 8):
        adapter = model_for(SHAPE, "bf16-split").state_dict_adapter
        mesh = init_device_mesh("cpu", (2, 1, 4), mesh_dim_names=("pp", "ep_shard", "ep"))
        result = adapter.from_hf(stored, device_mesh=mesh)
        for name, tensor in reference.items():
            assert result[name].device_mesh == mesh["ep"]
            assert torch.equal(result[name].to_local(), part(tensor, 2, 1, 4))
    with rank_of(3, 4):
        adapter = model_for(SHAPE, "bf16-split").state_dict_adapter
        result = adapter.from_hf(stored, device_mesh=init_device_mesh("cpu", (4,)))
        for name, tensor in reference.items():
            assert torch.equal(result[name].to_local(), part(tensor, 3, 1, 4))


def test_only_the_experts_of_the_rank_are_needed() -> None:
    stored, _ = built(SHAPE, "mxfp4-fused")
    with rank_of(1, 4):
        adapter = model_for(SHAPE, "mxfp4-fused").state_dict_adapter
        mesh = expert_mesh(1, 4)
        own = {key: t for key, t in stored.items() if ".experts." not in key or int(key.split(".")[5]) in (3, 4, 5)}
        assert len(own) == len(stored) - 9 * 3 * 2 * len(LAYERS)
        result = adapter.from_hf(own, device_mesh=mesh)
        for name, tensor in stacks_of(filled("mxfp4-fused")).items():
            assert torch.equal(result[name].to_local(), tensor[3:6])
        for e in (3, 5):
            for suffix in ("", "_scale"):
                del own[f"model.layers.2.mlp.experts.{e}.up_proj.weight{suffix}"]
        with pytest.raises(CheckpointError) as error:
            adapter.from_hf(own, device_mesh=mesh)
        assert "2 missing" in str(error.value)
        assert "model.layers.2.mlp.experts.{3..5}.up_proj.weight (2)" in str(error.value)
        unknown = "model.layers.2.mlp.experts.12.up_proj.weight"
        with pytest.raises(CheckpointError, match="1 unexpected"):
            adapter.from_hf({**stored, unknown: torch.zeros(64, 64)}, device_mesh=mesh)


@pytest.mark.parametrize(("shards", "ep"), [(1, 4), (2, 2)])
@pytest.mark.parametrize("form", ["bf16-split", "fp8-fused", "mxfp4-fused"])
def test_a_load_into_sharded_stacks_and_projections(form: str, shards: int, ep: int) -> None:
    stored, _ = built(SHAPE, form)
    reference = filled(form)
    seen: set[str] = set()
    for rank in range(shards * ep):
        with rank_of(rank, shards * ep):
            experts, dense = expert_mesh(shards, ep), init_device_mesh("cpu", (shards * ep,))
            model = model_for(SHAPE, form)
            adapter = model.state_dict_adapter
            state: dict[str, Tensor] = {
                name: sharded(tensor, experts, [Shard(1), Shard(0)])
                if name in stacks_of(reference)
                else sharded(tensor, dense, [Shard(0)])
                for name, tensor in model.state_dict().items()
            }
            quantised = form != "bf16-split"
            destinations = adapter.to_hf(state, quantization=quantised, for_checkpoint_load=True)
            seen |= destinations.keys()
            for key, tensor in destinations.items():
                assert tensor.shape == stored[key].shape, key
                if isinstance(tensor, DTensor):
                    value = sharded(stored[key].to(tensor.dtype), tensor.device_mesh, list(tensor.placements))
                    tensor.to_local().copy_(value.to_local())
                else:
                    tensor.copy_(stored[key])
            result = adapter.from_hf(destinations)
            assert result.keys() == state.keys()
            for name, tensor in state.items():
                assert result[name] is tensor, name
                expected = sharded(reference[name], tensor.device_mesh, list(tensor.placements))
                assert torch.equal(tensor.to_local(), expected.to_local()), name
                if name in stacks_of(reference):
                    assert torch.equal(tensor.to_local(), part(reference[name], rank, shards, ep)), name
    assert seen == stored.keys()


def test_the_matrices_of_a_sharded_stack() -> None:
    reference = filled("bf16-split")
    name = "model.layers.1.mlp.experts.gate_and_up_projs"
    with rank_of(3, 4):
        adapter = model_for(SHAPE, "bf16-split").state_dict_adapter
        stack = sharded(reference[name], expert_mesh(2, 2), [Shard(1), Shard(0)])
        pairs = dict(adapter.convert_single_tensor_to_hf(name, stack))
        assert list(pairs) == [
            f"model.layers.1.mlp.experts.{e}.{half}_proj.weight" for e in range(6, 12) for half in ("gate", "up")
        ]
        up = pairs["model.layers.1.mlp.experts.8.up_proj.weight"]
        assert isinstance(up, DTensor)
        assert (up.shape, up.placements) == ((64, 64), (Shard(1),))
        assert up.device_mesh.mesh_dim_names == ("ep_shard",)
        assert torch.equal(up.to_local(), reference[name][8, 32:, 64:].t())
        up.to_local().zero_()  # a view: whoever fills it fills the stack
        assert not stack.to_local()[2, :, 64:].any()
        packed = dict(adapter._make_mxfp4_load_destinations("x", up))
        assert [(t.shape, t.to_local().shape) for t in packed.values()] == [((64, 32), (64, 16)), ((64, 2), (64, 1))]
        assert all(t.placements == up.placements and t.device_mesh == up.device_mesh for t in packed.values())
        whole = sharded(reference[name], expert_mesh(1, 4), [Replicate(), Shard(0)])
        matrix = dict(adapter.convert_single_tensor_to_hf(name, whole))["model.layers.1.mlp.experts.9.up_proj.weight"]
        assert not isinstance(matrix, DTensor)
        assert torch.equal(matrix, reference[name][9, :, 64:].t())
        with pytest.raises(CheckpointError, match="this rank's part has 16 columns"):
            adapter._make_mxfp4_load_destinations(
                "x", sharded(torch.zeros(64, 64), init_device_mesh("cpu", (4,)), [Shard(1)])
            )


def test_packed_matrices_without_a_load_stay_sharded() -> None:
    stored, decoded = built(SHAPE, "mxfp4-fused")
    key = "model.layers.1.mlp.experts.3.down_proj.weight"
    with rank_of(1, 2):
        adapter = model_for(SHAPE, "mxfp4-fused").state_dict_adapter
        mesh = init_device_mesh("cpu", (2,))
        pair = {name: sharded(stored[name], mesh, [Shard(0)]) for name in (key, f"{key}_scale")}
        result = adapter._dequantize_mxfp4_experts(dict(pair))[key]
        assert isinstance(result, DTensor)
        assert (result.shape, result.placements) == ((64, 64), (Shard(0),))
        assert torch.equal(result.to_local(), decoded[key][32:])


@pytest.mark.usefixtures("alone")
def test_an_export_of_dtensors_has_the_bytes_of_one_of_tensors() -> None:
    model = model_for(SHAPE, "fp8-fused")
    fill(model, values(SHAPE))
    adapter = model.state_dict_adapter
    state = dict(model.state_dict())
    expected = adapter.to_hf(state, quantization=True)
    experts, dense = expert_mesh(1, 1), init_device_mesh("cpu", (1,))
    shards: dict[str, Tensor] = {
        name: sharded(tensor, experts, [Shard(1), Shard(0)])
        if name in stacks_of(state)
        else sharded(tensor, dense, [Shard(0)])
        for name, tensor in state.items()
    }
    exported = adapter.to_hf(shards, quantization=True)
    assert exported.keys() == expected.keys()
    for key, tensor in exported.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert (whole.dtype, whole.shape) == (expected[key].dtype, expected[key].shape)
        assert torch.equal(whole.view(torch.uint8), expected[key].contiguous().view(torch.uint8)), key
    again = model_for(SHAPE, "fp8-fused")
    again.load_state_dict(again.state_dict_adapter.from_hf(expected))
    assert_holds(again, built(SHAPE, "fp8-fused")[1])


def test_copies_into_a_shard() -> None:
    whole = torch.arange(15.0).view(5, 3)
    for rank, rows in ((0, slice(0, 3)), (1, slice(3, 5))):
        with rank_of(rank, 2):
            native = sharded(torch.zeros(5, 3, dtype=torch.bfloat16), init_device_mesh("cpu", (2,)), [Shard(0)])
            local = MiMoV2FlashStateDictAdapter._local_tensor(native)
            assert local.data_ptr() == native.to_local().data_ptr()
            MiMoV2FlashStateDictAdapter._copy_converted_to_native(native, local, whole)
            assert torch.equal(native.to_local().float(), whole[rows])


def test_what_a_mesh_cannot_hold() -> None:
    stored, _ = built(SHAPE, "fp8-fused")
    name = "model.layers.1.mlp.experts.down_projs"
    with rank_of(0, 8):
        adapter = model_for(SHAPE, "fp8-fused").state_dict_adapter
        meshes = {
            "cannot be sharded equally": init_device_mesh("cpu", (8,)),
            "no dimension named ep": init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")),
        }
        for words, mesh in meshes.items():
            with pytest.raises(CheckpointError, match=words):
                adapter.from_hf(stored, device_mesh=mesh)
        stack = torch.zeros(12, 64, 64)
        columns = sharded(stack, init_device_mesh("cpu", (8,)), [Shard(2)])
        with pytest.raises(
            CheckpointError, match=rf"{name} is sharded as .*Shard\(dim=2\).*; experts are sharded over"
        ):
            adapter.to_hf({name: columns})
        unnamed = sharded(stack, init_device_mesh("cpu", (4, 2)), [Shard(1), Shard(0)])
        with pytest.raises(CheckpointError, match="its dimensions need names"):
            adapter.to_hf({name: unnamed})
        rows = init_device_mesh("cpu", (8,))

        def cut(key: str) -> dict[str, Tensor]:
            return {**stored, key: sharded(stored[key].view(torch.uint8), rows, [Shard(0)]).view(torch.float8_e4m3fn)}

        with pytest.raises(CheckpointError, match=r"sharded fused projections cannot be split: .*qkv_proj"):
            adapter.from_hf(cut("model.layers.0.self_attn.qkv_proj.weight"))
        with pytest.raises(CheckpointError, match=r"sharded FP8 matrices cannot be decoded.*up_proj"):
            adapter.from_hf(cut("model.layers.0.mlp.up_proj.weight"))
        split = dict(built(SHAPE, "bf16-split")[0])
        adapter = model_for(SHAPE, "bf16-split").state_dict_adapter
        key = "model.layers.1.mlp.experts.0.down_proj.weight"
        split[key] = sharded(split[key], rows, [Shard(0)])
        with pytest.raises(CheckpointError, match="does not fit"):
            adapter.from_hf(split)


class Plain(MoESplitExpertsStateDictMixin):
    """The mixin as other adapters have it."""

    def __init__(self, path: str) -> None:
        self.moe_config = MoEConfig(
            n_routed_experts=12, n_shared_experts=None, n_activated_experts=2, n_expert_groups=1, n_limited_groups=1,
            train_gate=True, gate_bias_update_factor=0.0, aux_loss_coeff=0.0, score_func="sigmoid", route_scale=None,
            dim=5, inter_dim=7, moe_inter_dim=3, norm_topk_prob=True,
        )  # fmt: skip
        self.dtype = torch.float32
        self._expert_path_segment = path


@pytest.mark.parametrize("path", ["mlp.experts", "block.moe"])
def test_the_mixin_alone(path: str) -> None:
    adapter = Plain(path)
    stacks = {f"a.{path}.gate_and_up_projs": torch.randn(12, 5, 6), f"a.{path}.down_projs": torch.randn(12, 3, 5)}
    pairs = dict(pair for name, stack in stacks.items() for pair in adapter._split_experts(name, stack))
    assert len(pairs) == 36
    assert torch.equal(pairs[f"a.{path}.10.up_proj.weight"], stacks[f"a.{path}.gate_and_up_projs"][10, :, 3:].t())
    assert adapter._split_experts("a.other.down_projs", stacks[f"a.{path}.down_projs"])[0][0] == "a.other.down_projs"
    copies = {"w": torch.zeros(1), **{key: t.clone() for key, t in sorted(pairs.items())}}
    merged = adapter._merge_experts(copies, adapter._expert_stacks(copies, None, {}))
    assert merged.keys() == {"w", *stacks}
    assert all(torch.equal(merged[name], stack) for name, stack in stacks.items())
    del copies[f"a.{path}.10.up_proj.weight"]
    copies[f"a.{path}.2.up_proj.weight"] = torch.zeros(1, 5)
    with pytest.raises(RuntimeError, match=f"2 expert matrices are missing or of the wrong shape: a.{path}.2.up_proj"):
        adapter._merge_experts(copies, adapter._expert_stacks(copies, None, {}))
    adapter.moe_config = None
    with pytest.raises(CheckpointError, match="the model has no experts"):
        adapter._expert_stacks(copies, None, {})
