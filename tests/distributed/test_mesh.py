"""Sizes of the parallel dimensions, what is refused, and which ranks end up together."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from automimo.distributed.mesh import ParallelSizes, build_meshes, infer_sizes
from automimo.errors import ConfigError


def test_what_is_not_said_is_inferred():
    assert infer_sizes(8) == ParallelSizes(pipeline=1, replicate=1, shard=8, context=1, expert=1)
    assert infer_sizes(16, replicate=2, expert=4, n_experts=256) == ParallelSizes(1, 2, 8, 1, 4)
    assert infer_sizes(16, context=2, pipeline=2) == ParallelSizes(2, 1, 4, 2, 1)
    sizes = infer_sizes(64, context=2, pipeline=2, replicate=2, expert=32, n_experts=256)
    assert (sizes.data, sizes.shard, sizes.stage, sizes.expert_shard, sizes.world) == (16, 8, 32, 1, 64)
    assert infer_sizes(1) == ParallelSizes(1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("world", "given", "said"),
    [
        (6, {"context": 4}, r"6 processes cannot be divided into parallel.pipeline 1 x parallel.context 4 = 4"),
        (1, {"pipeline": 2}, r"this is one process, but .* pipeline 2\): start several with --nproc N or torchrun"),
        (4, {"data": 3}, r"parallel.data is 3, but 4 processes / .* is 4: start 3 processes, or leave"),
        (
            6,
            {"replicate": 4},
            r"parallel.replicate 4 does not divide the 6 data ranks; it may be one of \[1, 2, 3, 6\]",
        ),
        (6, {"expert": 4, "n_experts": 8}, r"parallel.expert 4 does not divide the 6 ranks .* \[1, 2\]"),
        (6, {"expert": 3, "n_experts": 8}, r"parallel.expert 3 does not divide the 8 experts .* \[1, 2\]"),
        (4, {"expert": 2}, r"parallel.expert is 2, but the model has no experts"),
    ],
)
def test_impossible_combinations_name_their_numbers(world, given, said):
    with pytest.raises(ConfigError, match=said):
        infer_sizes(world, **given)


def timeouts(rank: int) -> list[float]:
    meshes = build_meshes(infer_sizes(4, n_experts=8, replicate=2, expert=2), "cpu", 4321)
    assert meshes.expert is not None
    found = [mesh.get_group(dim) for mesh in (meshes.dense, meshes.expert) for dim in range(mesh.ndim)]
    cpu = torch.device("cpu")
    return [g._get_backend(cpu).options._timeout.total_seconds() for g in found if g.size() > 1]


def test_every_group_of_a_mesh_has_the_time_out_that_was_asked_for():
    """torch gives a new group 30 minutes, whatever the default group has."""
    for found in run_ranks(4, timeouts):
        assert found == [4321.0] * 4


def groups(rank: int, given: dict[str, int]) -> dict[str, list[int]]:
    meshes = build_meshes(infer_sizes(dist.get_world_size(), n_experts=8, **given), "cpu")
    fsdp = meshes.fsdp
    found = {f"fsdp{dim}": dist.get_process_group_ranks(fsdp.get_group(dim)) for dim in range(fsdp.ndim)}
    if meshes.expert is not None:
        names = ("ep_shard", "ep")
        found |= {name: dist.get_process_group_ranks(meshes.expert[name].get_group()) for name in names}
    return found


def test_experts_are_shared_by_neighbours():
    """Ranks next to each other, which are on one machine, exchange tokens; the far ones exchange shards."""
    assert run_ranks(4, groups, {"expert": 2}) == [
        {"fsdp0": [0, 1, 2, 3], "ep_shard": [0, 2], "ep": [0, 1]},
        {"fsdp0": [0, 1, 2, 3], "ep_shard": [1, 3], "ep": [0, 1]},
        {"fsdp0": [0, 1, 2, 3], "ep_shard": [0, 2], "ep": [2, 3]},
        {"fsdp0": [0, 1, 2, 3], "ep_shard": [1, 3], "ep": [2, 3]},
    ]


def test_replicas_are_far_apart_and_context_is_near():
    assert run_ranks(4, groups, {"replicate": 2})[1] == {"fsdp0": [1, 3], "fsdp1": [0, 1]}
    assert run_ranks(4, groups, {"context": 2})[2] == {"fsdp0": [0, 1, 2, 3]}
    assert run_ranks(4, groups, {"context": 2, "replicate": 2})[3] == {"fsdp0": [1, 3], "fsdp1": [2, 3]}
