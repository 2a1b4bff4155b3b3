"""How many ranks do what: sizes of the parallel dimensions, and the meshes made of them."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from automimo.errors import ConfigError

PP, DP_REPLICATE, DP_SHARD, CP = "pp", "dp_replicate", "dp_shard", "cp"
DP_SHARD_CP = "dp_shard_cp"
EP_SHARD, EP = "ep_shard", "ep"


@dataclass(frozen=True)
class ParallelSizes:
    """Ranks along each dimension; their product is the world, where `expert` runs across the data and context ranks.

    pipeline: stages. replicate: copies of the sharded model (HSDP). shard: ranks that share one copy of the parameters.
    context: ranks that share a sequence. expert: ranks that share the experts of a layer.
    """

    pipeline: int
    replicate: int
    shard: int
    context: int
    expert: int

    @property
    def data(self) -> int:
        """Ranks that see different rows."""
        return self.replicate * self.shard

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data * self.context

    @property
    def expert_shard(self) -> int:
        """Ranks that share one expert-parallel part of the experts (FSDP of the experts)."""
        return self.stage // self.expert

    @property
    def dense_shards(self) -> int:
        """Parts that everything but the experts is cut into."""
        return self.shard * self.context

    @property
    def expert_shards(self) -> int:
        """Parts that the experts are cut into: with expert parallelism over all ranks of a stage, replicas included."""
        return self.stage if self.expert > 1 else self.dense_shards

    @property
    def world(self) -> int:
        return self.stage * self.pipeline


def infer_sizes(
    world: int,
    *,
    data: int | None = None,
    replicate: int = 1,
    expert: int = 1,
    context: int = 1,
    pipeline: int = 1,
    n_experts: int | None = None,
) -> ParallelSizes:
    """Sizes for `world` ranks; `data` None is whatever the others leave.

    Raises ConfigError, with the numbers, where the ranks do not divide, and where `n_experts` (None: a model without
    experts) cannot be shared equally.
    """
    if world == 1 and max(data or 1, replicate, expert, context, pipeline) > 1:
        raise ConfigError(
            f"this is one process, but the recipe shares the work (parallel.data {data or 1}, replicate {replicate}, "
            f"expert {expert}, context {context}, pipeline {pipeline}): start several with --nproc N or torchrun, or "
            "give 1 for each"
        )
    others = context * pipeline
    if world % others:
        raise ConfigError(
            f"{_ranks(world)} cannot be divided into parallel.pipeline {pipeline} x parallel.context {context} = "
            f"{others}: start a multiple of {others}"
        )
    left = world // others
    if data is None:
        data = left
    if data != left:
        raise ConfigError(
            f"parallel.data is {data}, but {_ranks(world)} / (parallel.pipeline {pipeline} x parallel.context "
            f"{context}) is {left}: start {data * others} processes, or leave parallel.data out"
        )
    if data % replicate:
        raise ConfigError(
            f"parallel.replicate {replicate} does not divide the {data} data ranks; it may be one of {_divisors(data)}"
        )
    stage = data * context
    fitting = [d for d in _divisors(stage) if n_experts is None or n_experts % d == 0]
    if stage % expert:
        raise ConfigError(
            f"parallel.expert {expert} does not divide the {stage} ranks that share a layer; it may be one of {fitting}"
        )
    if expert > 1 and n_experts is None:
        raise ConfigError(f"parallel.expert is {expert}, but the model has no experts: leave it out")
    if n_experts is not None and n_experts % expert:
        raise ConfigError(
            f"parallel.expert {expert} does not divide the {n_experts} experts of a layer; it may be one of {fitting}"
        )
    return ParallelSizes(pipeline, replicate, data // replicate, context, expert)


@dataclass(frozen=True)
class Meshes:
    """dense: (pp, dp_replicate, dp_shard, cp) over all ranks. fsdp: what FSDP shards over, (dp_shard_cp) or, with
    replicas, (dp_replicate, dp_shard_cp), over the ranks of our stage. expert: (ep_shard, ep) over the same; with one
    expert-parallel rank None, since experts are then sharded as everything else is."""

    sizes: ParallelSizes
    dense: DeviceMesh
    fsdp: DeviceMesh
    expert: DeviceMesh | None


def build_meshes(sizes: ParallelSizes, device_type: str, timeout_s: float | None = None) -> Meshes:
    """The meshes over the ranks of the default process group.

    `timeout_s`: of the collectives in them; torch gives new groups its own default, not that of the default group.
    """

    def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        made = init_device_mesh(device_type, (sizes.pipeline, *shape), mesh_dim_names=(PP, *names))
        if timeout_s is not None:
            for dim in range(made.ndim):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), made.get_group(dim))
        return made

    dense = mesh((sizes.replicate, sizes.shard, sizes.context), (DP_REPLICATE, DP_SHARD, CP))
    shards, shard_name = dense, DP_SHARD
    if sizes.context > 1:
        # Of its own: torch cannot slice a mesh by a dimension that was flattened and one that was not.
        shards, shard_name = mesh((sizes.replicate, sizes.dense_shards), (DP_REPLICATE, DP_SHARD_CP)), DP_SHARD_CP
    fsdp = shards[shard_name] if sizes.replicate == 1 else shards[DP_REPLICATE, shard_name]
    if sizes.expert == 1:
        return Meshes(sizes, dense, fsdp, None)
    experts = mesh((sizes.expert_shard, sizes.expert), (EP_SHARD, EP))
    return Meshes(sizes, dense, fsdp, experts[EP_SHARD, EP])


def _ranks(world: int) -> str:
    return "1 process" if world == 1 else f"{world} processes"


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
