"""Gradient accumulation under FSDP2 without communication that nobody needs."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from automimo.backend import BackendConfig


class MoEFSDPSyncMixin:
    """For models with experts: says when gradients are exchanged and parameters are gathered during accumulation.

    Call `prepare_for_grad_accumulation` before every micro-batch but the last and `prepare_for_final_backward` before
    the last, in both cases before the forward pass. Gradients are then summed locally, in fp32 and unsharded, and
    exchanged once per optimizer step; parameters are gathered once per step and stay. That costs the memory of
    unsharded parameters and gradients: with `backend.enable_fsdp_optimizations` False both calls do nothing, and every
    micro-batch gathers and exchanges, which gives the same sums.

    Every FSDP unit below the model is reached, however it is nested, so none can drop out of the accumulation. Without
    FSDP units nothing happens. `pp_enabled` says that a pipeline schedule runs the micro-batches; it makes no
    difference here.
    """

    backend: BackendConfig

    def prepare_for_grad_accumulation(self, pp_enabled: bool = False) -> None:
        """The next backward is not the last of its optimizer step."""
        self._set_sync(False, pp_enabled)

    def prepare_for_final_backward(self, pp_enabled: bool = False) -> None:
        """The next backward is the last of its optimizer step."""
        self._set_sync(True, pp_enabled)

    def _set_sync(self, last: bool, _pp_enabled: bool) -> None:
        if not self.backend.enable_fsdp_optimizations:
            return
        for unit in fsdp_units(self):
            if not last:
                # For good: a model that accumulates has the memory for it, and freeing after the last forward pass
                # would only gather once more for its backward.
                unit.set_reshard_after_forward(False, recurse=False)
            unit.set_is_last_backward(last)
            unit.set_reshard_after_backward(last, recurse=False)
            unit.set_requires_gradient_sync(last, recurse=False)


def fsdp_units(model: object) -> Iterator[FSDPModule]:
    """All FSDP units of a model."""
    assert isinstance(model, nn.Module)
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))
