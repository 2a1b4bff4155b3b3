"""Stacks of experts <-> one matrix per expert, as checkpoints store them, on one device or sharded over a mesh.

Legend: E experts, D hidden width, I expert width. A stack is `gate_and_up_projs` [E, D, 2 I] or `down_projs` [E, I, D];
a checkpoint has `<expert>.{gate,up}_proj.weight` [I, D] and `<expert>.down_proj.weight` [D, I]. Every matrix is a
*view* of its stack, so filling the matrices fills the model, and nothing is held twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from automimo.distributed.local import local_tensor
from automimo.errors import CheckpointError
from automimo.moe.config import MoEConfig

EP, EP_SHARD = "ep", "ep_shard"
_PARTS = {"gate_and_up_projs": ("gate", "up"), "down_projs": ("down",)}
_STACK = re.compile(r"(?P<experts>.*)\.(?P<stack>gate_and_up_projs|down_projs)$")
_MATRIX = re.compile(r"(?P<experts>.*)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight$")


class MissingExpertsError(CheckpointError, RuntimeError):
    """A stack of experts whose matrices are not all there; a RuntimeError too, as callers of the mixin expect."""


class MoESplitExpertsStateDictMixin:
    """For state-dict adapters: splits stacks of experts into matrices and merges them again.

    Under expert parallelism a stack is a DTensor with Shard(0) over the mesh dimension "ep", and possibly Shard(1) over
    "ep_shard" (FSDP of the experts). Then each rank sees only its own experts, and with "ep_shard" their matrices are
    DTensors themselves. `_expert_path_segment` is how the path of a stack ends.
    """

    moe_config: MoEConfig | None
    dtype: torch.dtype

    _expert_path_segment = "mlp.experts"

    def _is_experts(self, path: str) -> bool:
        return path == self._expert_path_segment or path.endswith(f".{self._expert_path_segment}")

    def _is_stack(self, name: str) -> bool:
        """Whether one of our names is that of a stack."""
        match = _STACK.match(name)
        return match is not None and self._is_experts(match["experts"])

    def _stack_name(self, key: str) -> str | None:
        """The stack that a checkpoint key belongs to, None for one that is no matrix of an expert."""
        match = _MATRIX.match(key)
        if match is None or not self._is_experts(match["experts"]):
            return None
        return f"{match['experts']}.{'down_projs' if match['part'] == 'down' else 'gate_and_up_projs'}"

    def _split_experts(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The matrices (key, view [out, in]) of the stack `name` that are on this rank; any other tensor as it is.

        Raises CheckpointError for a DTensor that is sharded in a way in which a matrix cannot be a view of it.
        """
        match = _STACK.match(name)
        if match is None or not self._is_stack(name):
            return [(name, tensor)]
        local, first = tensor, 0
        if isinstance(tensor, DTensor):
            local, first = local_tensor(tensor), _first_local_expert(name, tensor)
        return [
            (f"{match['experts']}.{first + i}.{part}_proj.weight", _like_stack(expert_view(local[i], part), tensor))
            for i in range(local.shape[0])
            for part in _PARTS[match["stack"]]
        ]

    def _expert_stacks(
        self, state_dict: Mapping[str, Any], device_mesh: DeviceMesh | None, known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """A stack for every layer whose experts are in a checkpoint's state dict: the `known` one, or new memory.

        New stacks are of `dtype`, on the device of their first matrix; with a `device_mesh` they hold this rank's
        experts (see `new_stack`). Raises CheckpointError when the model has no experts.
        """
        stacks: dict[str, Tensor] = {}
        for key, matrix in state_dict.items():
            name = self._stack_name(key)
            if name is None or name in stacks:
                continue
            if self.moe_config is None:
                raise CheckpointError(f"state dict: it has {key} but the model has no experts")
            stack = known.get(name)
            stacks[name] = (
                new_stack(name, self.moe_config, self.dtype, matrix.device, device_mesh) if stack is None else stack
            )
        return stacks

    def _remote_matrices(self, keys: Iterable[str], stacks: Mapping[str, Tensor]) -> list[str]:
        """The keys of matrices of experts that `stacks` have on other ranks."""
        local = {key for name, stack in stacks.items() for key, _ in self._split_experts(name, stack)}
        result = []
        for key in keys:
            name, match = self._stack_name(key), _MATRIX.match(key)
            if name is not None and match is not None and key not in local:
                result += [key] if int(match["expert"]) < stacks[name].shape[0] else []
        return result

    def _merge_experts(self, state_dict: Mapping[str, Any], stacks: Mapping[str, Tensor]) -> dict[str, Any]:
        """The state dict with each layer's matrices replaced by its stack, filled where a matrix does not lie in it
        yet."""
        result: dict[str, Any] = {}
        found: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state_dict.items():
            name = self._stack_name(key)
            result[name or key] = tensor if name is None else stacks[name]
            if name is not None:
                found.setdefault(name, {})[key] = tensor
        for name, matrices in found.items():
            views = dict(self._split_experts(name, stacks[name]))
            self._check_expert_matrices(matrices, views)
            for key, view in views.items():
                copy_to_native(view, matrices[key])
        return result

    def _check_expert_matrices(self, found: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> None:
        """Raise MissingExpertsError unless every needed matrix of a stack was found, in its shape."""
        wrong = [key for key, view in needed.items() if key not in found or found[key].shape != view.shape]
        if wrong:
            shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise MissingExpertsError(f"{len(wrong)} expert matrices are missing or of the wrong shape: {shown}")


def new_stack(
    name: str, config: MoEConfig, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh | None
) -> Tensor:
    """Uninitialised memory for the stack `name`; with a mesh a DTensor of which only this rank's part exists.

    The mesh has a dimension "ep" (or is one-dimensional), over which dimension 0 is sharded, and may have "ep_shard",
    over which dimension 1 is. Raises CheckpointError when it has neither or does not divide them.
    """
    rows, columns = (
        (config.moe_inter_dim, config.dim) if name.endswith("down_projs") else (config.dim, 2 * config.moe_inter_dim)
    )
    experts = config.n_routed_experts
    if mesh is None:
        return torch.empty((experts, rows, columns), dtype=dtype, device=device)
    mesh = _expert_mesh(mesh)
    ranks = [mesh.size(dim) for dim in range(mesh.ndim)]
    if experts % ranks[-1] or rows % (ranks[0] if mesh.ndim == 2 else 1):
        raise CheckpointError(f"{name}: {experts} experts of {rows} rows cannot be sharded equally over {mesh}")
    placements: list[Placement] = [Shard(1), Shard(0)] if mesh.ndim == 2 else [Shard(0)]
    local = (experts // ranks[-1], rows // (ranks[0] if mesh.ndim == 2 else 1), columns)
    return DTensor.from_local(torch.empty(local, dtype=dtype, device=device), mesh, placements, run_check=False)


def copy_to_native(native: Tensor, value: Tensor) -> None:
    """Fill this rank's part of `native` with `value`, unless it lies there already.

    `value` is the whole tensor or a DTensor with the placements of `native`. Dtype and device are converted.
    """
    target = local_tensor(native)
    if isinstance(value, DTensor):
        if not isinstance(native, DTensor) or native.placements != value.placements:
            raise CheckpointError(f"a tensor sharded as {value.placements} does not fit one of {type(native).__name__}")
        source = local_tensor(value)
    elif isinstance(native, DTensor):
        copy_whole(native, target, value)
        return
    else:
        source = value
    if not same_memory(target, source):
        with torch.no_grad():
            target.copy_(source)


def copy_whole(native: Tensor, target: Tensor, value: Tensor) -> None:
    """Copy the whole tensor `value` into `target`, this rank's memory of `native`, without communication."""
    with torch.no_grad():
        if isinstance(native, DTensor):
            # No source rank: every rank has the whole value and cuts out its own part.
            value = value.to(target.device)
            value = distribute_tensor(value, native.device_mesh, native.placements, src_data_rank=None).to_local()
        target.copy_(value)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements."""
    return a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype


def expert_view(matrix: Tensor, part: str) -> Tensor:
    """The `part` ("gate", "up", "down") of one expert of a stack, as a checkpoint has it: [out, in]."""
    if part == "down":
        return matrix.t()
    half = matrix.shape[1] // 2
    return (matrix[:, :half] if part == "gate" else matrix[:, half:]).t()


def _like_stack(view: Tensor, stack: Tensor) -> Tensor:
    """A local matrix as what it is globally: a DTensor where dimension 1 of its stack is sharded."""
    if not isinstance(stack, DTensor):
        return view
    mesh, dims = stack.device_mesh, [dim for dim, placement in enumerate(stack.placements) if placement.is_shard(1)]
    if not dims:
        return view
    if len(dims) < mesh.ndim:
        if mesh.mesh_dim_names is None:
            raise CheckpointError(f"experts sharded over {mesh}: its dimensions need names, such as ep_shard and ep")
        names = tuple(mesh.mesh_dim_names[dim] for dim in dims)
        mesh = mesh[names]
    shape = Size((view.shape[0], stack.shape[1]))
    return DTensor.from_local(view, mesh, [Shard(1)] * len(dims), run_check=False, shape=shape, stride=(shape[1], 1))


def _first_local_expert(name: str, stack: DTensor) -> int:
    """The number of this rank's first expert. Raises CheckpointError for placements whose matrices are no views."""
    first, count = 0, stack.shape[0]
    coordinate = stack.device_mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointError(f"{name}: this rank is not in its mesh {stack.device_mesh}")
    for dim, placement in enumerate(stack.placements):
        if type(placement) is Shard and placement.dim == 0:
            chunk = -(-count // stack.device_mesh.size(dim))
            skipped = min(chunk * coordinate[dim], count)
            first, count = first + skipped, min(chunk, count - skipped)
        elif not (placement.is_replicate() or (type(placement) is Shard and placement.dim == 1)):
            raise CheckpointError(
                f"{name} is sharded as {stack.placements}; experts are sharded over dimension 0 (ep) and 1 (ep_shard)"
            )
    return first


def _expert_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of a mesh that experts are sharded over: ("ep",) or ("ep_shard", "ep")."""
    names: Iterable[str] = mesh.mesh_dim_names or ()
    if EP not in names:
        if mesh.ndim == 1:
            return mesh
        raise CheckpointError(f"experts cannot be sharded over {mesh}: it has no dimension named {EP}")
    wanted = (EP_SHARD, EP) if EP_SHARD in names and mesh[EP_SHARD].size() > 1 else (EP,)
    return mesh if tuple(names) == wanted else mesh[wanted]
