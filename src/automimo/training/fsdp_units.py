"""The FSDP units that `parallelize` has made of a model, with what FSDP2 keeps to itself: sizes, dtypes, groups and
prefetch lists."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


@dataclass(eq=False)
class Unit:
    """An FSDP unit: its sizes and policies, then where it is in the step.

    size: bytes of its whole parameters in the dtype of forward, padded to equal shards. trained: values of those that
    get a gradient, padded. itemsize: of a gathered value. replicas: None where no dimension is replicated.
    """

    size: int
    trained: int
    itemsize: int
    shards: int
    replicas: int | None
    reshard: bool
    in_backward: bool
    next_forward: list["Unit"] = field(default_factory=list)
    next_backward: list["Unit"] = field(default_factory=list)
    whole: bool = False
    pending: bool = False
    done: bool = False
    accumulates: bool = False
    places: list[int] = field(default_factory=list)

    @property
    def buffer(self) -> int:
        """Bytes that an all-gather writes to before the parameters are taken apart; one rank copies its own."""
        return self.size if self.shards > 1 else 0


def fsdp_units(model: nn.Module) -> dict[nn.Module, Unit]:
    """The units by each of their modules, which a forward pass goes through. The root has none: nothing is left for it
    that a forward pass uses."""
    states = {m: fully_shard.state(m) for m in model.modules() if isinstance(m, FSDPModule)}  # type: ignore[attr-defined]
    made: dict[Any, Unit] = {}
    for module, state in states.items():
        group = state._fsdp_param_group
        if group is None or state in made or module is model:
            continue
        shards = group.mesh_info.mesh.size(-1)
        itemsize = max((group.mp_policy.param_dtype or p.sharded_param.dtype).itemsize for p in group.fsdp_params)
        values = [p.padded_sharded_param_size.numel() * shards for p in group.fsdp_params]
        trained = [n for n, p in zip(values, group.fsdp_params, strict=True) if p.sharded_param.requires_grad]
        made[state] = Unit(
            size=sum(values) * itemsize,
            trained=sum(trained),
            itemsize=itemsize,
            shards=shards,
            replicas=group.mesh_info.mesh.size(0) if group.mesh_info.mesh.ndim > 1 else None,
            reshard=group.post_forward_mesh_info is not None,
            in_backward=group.unshard_in_backward,
        )
    for state, unit in made.items():
        unit.next_forward = [made[s] for s in state._states_to_forward_prefetch if s in made]
        unit.next_backward = [made[s] for s in state._states_to_backward_prefetch if s in made]
    return {module: made[state] for module, state in states.items() if state in made}
