"""Tensors that stay in fp32 whatever the rest of the model is cast to.

The router weight, its correction bias, the attention sinks and the rotary tables must not be rounded to bf16: its eight
bits of mantissa send tokens to other experts and turn a rotary angle at position 100,000 into another position's. They
are created in fp32, and every later `model.to(bfloat16)`, `.half()` or `.bfloat16()` has to pass over them. `KeepFp32`
is the one place where that is done.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import Tensor, nn


class KeepFp32(nn.Module):
    """A module whose own parameters and buffers (not those of its children) never fall below fp32.

    Subclass it instead of `nn.Module` (first in the list of bases). Casts of the module, or of any model around it, to
    bf16 or fp16 leave the floating-point tensors held directly by it, and their gradients, bit for bit as they were;
    moves to another device, `to_empty` from meta, and `.double()` (which loses nothing) work as usual. A tensor that
    was put in with a narrower dtype, for example by `load_state_dict(assign=True)`, is raised to fp32 by the next
    cast or move. FSDP2's mixed-precision policy does not go through here: give such a module a policy of its own.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept: set[int] = set()
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                kept.add(id(tensor))
                if tensor.grad is not None:
                    kept.add(id(tensor.grad))

        def keep(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if id(tensor) not in kept or out.dtype in (torch.float32, torch.float64):
                return out
            # Not out.float(): that would be the rounded value. `out` only says where the tensor is to live.
            return tensor.to(device=out.device, dtype=torch.float32)

        # Children get the plain function: what they keep is their own affair.
        if recurse:
            for child in self.children():
                child._apply(fn)
        super()._apply(keep, recurse=False)
        return self


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Context in which autocast is off, so that an fp32 matmul inside really runs in fp32."""
    if not torch.amp.is_autocast_available(device.type):  # the meta device, for one
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a matmul on `x` runs in: the autocast dtype where autocast is on, its own otherwise."""
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
