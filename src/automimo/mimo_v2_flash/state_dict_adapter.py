"""State dicts of a MiMo-V2 model <-> those of a Hugging Face checkpoint in the plain split layout.

The correspondence itself is the table in `weights.py`; this is the form in which loaders and savers of whole state
dicts ask for it.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from automimo.backend import BackendConfig
from automimo.checkpoint import Ledger, StateDictAdapter, dtype_name
from automimo.checkpoint.adapter import StateDict
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.weights import check_layout, is_carried, parameter_of, places_of
from automimo.moe import MoEConfig


class MiMoV2FlashStateDictAdapter(StateDictAdapter):
    """Splits our stacks of experts into one matrix per expert and projection, and stacks them again.

    Every tensor that `to_hf` returns is a view of the one it was made from, so a loader that fills the result of
    ``to_hf(..., for_checkpoint_load=True)`` has filled the model; `from_hf` then hands the model's own stacks back.
    Stacks that `from_hf` has to make itself are of `dtype`; all other tensors pass through as they are. `moe_config` is
    None for a model without experts. `revision` is the Hub revision the checkpoint comes from.
    """

    def __init__(
        self,
        config: MiMoV2FlashConfig,
        moe_config: MoEConfig | None,
        backend: BackendConfig,
        dtype: torch.dtype = torch.bfloat16,
        revision: str | None = None,
    ) -> None:
        self.config = config
        self.moe_config = moe_config
        self.backend = backend
        self.dtype = dtype
        self.revision = revision
        # Stacks whose views a loader is filling, by parameter name; from `to_hf` until `from_hf`.
        self._filling: dict[str, Tensor] = {}

    def to_hf(
        self, state_dict: StateDict, exclude_key_regex: str | None = None, quantization: bool = False, **kwargs: Any
    ) -> StateDict:
        """Our state dict as checkpoint keys; keys that match `exclude_key_regex` are left out.

        `for_checkpoint_load=True` marks the result as destinations of a load. Raises CheckpointError for
        `quantization`, since the split layout has none, and for sharded tensors.
        """
        if quantization:
            raise CheckpointError(
                "to_hf(quantization=True): this version converts plain split checkpoints, not quantised ones"
            )
        if kwargs.get("for_checkpoint_load", False):
            self._filling = {name: tensor for name, tensor in state_dict.items() if _is_stack(name)}
        result: StateDict = {}
        for fqn, tensor in state_dict.items():
            result.update(self.convert_single_tensor_to_hf(fqn, tensor, exclude_key_regex=exclude_key_regex))
        return result

    def convert_single_tensor_to_hf(self, fqn: str, tensor: Any, **kwargs: Any) -> list[tuple[str, Any]]:
        """The checkpoint tensors, as (key, view), of our tensor `fqn`; `exclude_key_regex` as in `to_hf`."""
        if isinstance(tensor, DTensor):
            raise CheckpointError(f"{fqn} is sharded over {tensor.device_mesh}; this version converts whole tensors")
        exclude = kwargs.get("exclude_key_regex")
        views = [
            (key, place.view(tensor)) for key, place in places_of(fqn, tensor.shape[0] if tensor.dim() else 0).items()
        ]
        return [(key, view) for key, view in views if exclude is None or not re.match(exclude, key)]

    def from_hf(
        self,
        hf_state_dict: StateDict,
        device_mesh: DeviceMesh | None = None,
        **kwargs: Any,  # noqa: ARG002 - loaders pass options of their own
    ) -> StateDict:
        """Checkpoint tensors as our state dict, in the same order. Parts that a text model does not hold (MTP, vision,
        audio) are left out.

        Raises CheckpointError for a fused or quantised layout, for an incomplete stack of experts (naming the keys) and
        for a `device_mesh`: experts are not sharded here.
        """
        if device_mesh is not None:
            raise CheckpointError(f"from_hf: this version does not shard experts over a mesh, got {device_mesh}")
        check_layout("state dict", {key: dtype_name(tensor.dtype) for key, tensor in hf_state_dict.items()})
        result: StateDict = {}
        stacks: dict[str, dict[str, Tensor]] = {}
        for key, tensor in hf_state_dict.items():
            if is_carried(key):
                continue
            name = parameter_of(key)
            result[name] = tensor
            if name != key:
                stacks.setdefault(name, {})[key] = tensor
        filling, self._filling = self._filling, {}
        for name, matrices in stacks.items():
            result[name] = self._stack(name, matrices, filling.get(name))
        return result

    def _stack(self, name: str, matrices: dict[str, Tensor], stack: Tensor | None) -> Tensor:
        """All matrices of one parameter, in `stack` (a new tensor if None); those that already lie there are kept."""
        config = self.moe_config
        if config is None:
            raise CheckpointError(f"state dict: it has {next(iter(matrices))} but the model has no experts")
        if stack is None:
            down = name.endswith(".down_projs")
            shape = (config.moe_inter_dim, config.dim) if down else (config.dim, 2 * config.moe_inter_dim)
            like = next(iter(matrices.values()))
            stack = like.new_empty((config.n_routed_experts, *shape), dtype=self.dtype)
        views = {key: place.view(stack) for key, place in places_of(name, config.n_routed_experts).items()}
        ledger = Ledger({key: view.shape for key, view in views.items()})
        for key, matrix in matrices.items():
            ledger.consume(key, matrix.shape)
        ledger.check("state dict", f"the model has {config.n_routed_experts} experts per layer")
        with torch.no_grad():
            for key, view in views.items():
                if not _same_memory(matrices[key], view):
                    view.copy_(matrices[key])
        return stack

    @property
    def supports_write_through_checkpoint_load(self) -> bool:
        """True: every destination is a view of the model's own storage."""
        return True


def _is_stack(name: str) -> bool:
    return list(places_of(name, 1)) != [name]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype
