"""The base of what converts between the names and layouts of a checkpoint and those of a model."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

StateDict = dict[str, Any]


class StateDictAdapter(ABC):
    """Converts state dicts between a checkpoint's keys and layouts ("hf") and a model's own ("native").

    A loader asks `to_hf` for destinations, fills them from the files and hands them to `from_hf`; a saver asks `to_hf`
    for what to write. Values are tensors or DTensors.
    """

    @abstractmethod
    def to_hf(self, state_dict: StateDict, **kwargs: Any) -> StateDict:
        """Native state dict -> checkpoint keys, shapes and dtypes.

        A loader that reads quantised files passes `quantization=True` and `for_checkpoint_load=True`.
        """

    @abstractmethod
    def from_hf(self, hf_state_dict: StateDict, device_mesh: DeviceMesh | None = None, **kwargs: Any) -> StateDict:
        """Checkpoint state dict -> native one."""

    @abstractmethod
    def convert_single_tensor_to_hf(self, fqn: str, tensor: Any, **kwargs: Any) -> list[tuple[str, Any]]:
        """The checkpoint tensors, as (key, tensor), that the native tensor `fqn` becomes."""

    def get_hf_state_dict_keys(self, state_dict: StateDict) -> list[str]:
        """The checkpoint keys of a native state dict, in its order; no tensor data is touched or kept."""
        keys = []
        for fqn, tensor in state_dict.items():
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            keys += [key for key, _ in self.convert_single_tensor_to_hf(fqn, meta)]
        return keys

    @property
    @abstractmethod
    def supports_write_through_checkpoint_load(self) -> bool:
        """True when every destination of `to_hf(..., for_checkpoint_load=True)` aliases the model's own storage, so
        that filling the destinations has filled the model."""
