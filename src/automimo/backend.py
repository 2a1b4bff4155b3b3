"""BackendConfig: which implementation computes what. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from automimo.errors import ConfigError

# What each field may be on this installation. Names that other installations could offer are listed apart, so that
# asking for one says what is missing instead of "unknown".
CHOICES = MappingProxyType(
    {
        "attn": ("sdpa", "eager"),
        "linear": ("torch",),
        "rms_norm": ("torch_fp32", "torch"),
        "experts": ("torch_mm", "torch"),
        "dispatcher": ("torch", "deepep"),
        "gate_precision": (None, "float32"),
    }
)
NOT_INSTALLED = MappingProxyType({"attn": ("flex", "te")})


@dataclass
class BackendConfig:
    """The implementations a model is built with.

    attn: ``sdpa`` (exact, blocked, linear memory) or ``eager`` (the readable reference, T x T).
    linear: ``torch`` (``nn.Linear``).
    rms_norm: ``torch_fp32`` normalises in fp32 and multiplies by the weight in the input dtype (as the released
        modelling files do); ``torch`` is the fused ``torch.nn.functional.rms_norm``, one rounding apart in bf16.
    experts: ``torch_mm`` (one grouped matmul per projection) or ``torch`` (a loop over the experts).
    dispatcher: how tokens get to experts on other ranks: ``torch`` (all-to-all) or ``deepep`` (its own GPU kernels; the
        package is looked for when the model is made parallel). Experts on this device need none.
    gate_precision: compute dtype of the router; None and ``float32`` both mean fp32, the only one that trains well.
    enable_fsdp_optimizations: gradients are exchanged once per optimizer step instead of once per micro-batch, at the
        price of unsharded gradients in between; see ``MoEFSDPSyncMixin``.
    enable_hf_state_dict_adapter: attach a ``state_dict_adapter`` to the model.

    Raises ConfigError for a value that is unknown or not installed, listing the choices.
    """

    attn: str = "sdpa"
    linear: str = "torch"
    rms_norm: str = "torch_fp32"
    experts: str = "torch_mm"
    dispatcher: str = "torch"
    gate_precision: str | None = None
    enable_hf_state_dict_adapter: bool = True
    enable_fsdp_optimizations: bool = True

    def __post_init__(self) -> None:
        if self.gate_precision is not None:
            self.gate_precision = str(self.gate_precision).removeprefix("torch.")  # a torch.dtype is fine too
        for field in fields(self):
            if field.name in CHOICES:
                self._check(field.name, self.__dict__[field.name])

    @staticmethod
    def _check(name: str, value: Any) -> None:
        choices = CHOICES[name]
        if value in choices:
            return
        listed = ", ".join(str(choice) for choice in choices)
        reason = "is not installed here" if value in NOT_INSTALLED.get(name, ()) else "is unknown"
        raise ConfigError(f"backend.{name}: {value!r} {reason}; choose one of: {listed}")
