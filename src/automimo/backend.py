"""BackendConfig: which implementation computes what. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from automimo.errors import ConfigError

# What each field may be. Some choices need a package that is not one of ours, others are names that this version does
# not have: they are listed apart, so that asking for one says what is missing instead of "unknown".
CHOICES = MappingProxyType(
    {
        "attn": ("sdpa", "eager", "te"),
        "linear": ("torch",),
        "rms_norm": ("torch_fp32", "torch"),
        "experts": ("torch_mm", "torch"),
        "dispatcher": ("torch", "deepep"),
        "gate_precision": (None, "float32"),
    }
)
NOT_INSTALLED = MappingProxyType({"attn": ("flex",)})


@dataclass(frozen=True)
class Package:
    """The import name of a package that a choice needs, and how to install it."""

    name: str
    install: str


PACKAGES: Mapping[str, Mapping[str | None, Package]] = {
    "attn": {
        "te": Package(
            "transformer_engine", "pip install --no-build-isolation 'transformer_engine[pytorch]', for CUDA GPUs"
        )
    }
}


def usable(field: str) -> tuple[str | None, ...]:
    """The choices of `field` whose packages are installed here. They are looked for, but not imported."""
    needed = PACKAGES.get(field, {})
    return tuple(
        choice for choice in CHOICES[field] if choice not in needed or find_spec(needed[choice].name) is not None
    )


@dataclass
class BackendConfig:
    """The implementations a model is built with.

    attn: ``sdpa`` (exact, blocked, linear memory), ``eager`` (the readable reference, T x T) or, where it is installed,
        ``te`` (fused kernels of Transformer Engine: half precision on CUDA only, and sinks cannot be trained).
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
        choices = usable(name)
        if value in choices:
            return
        listed = ", ".join(str(choice) for choice in choices)
        if value in CHOICES[name]:
            reason = f"is not installed here ({PACKAGES[name][value].install})"
        else:
            reason = "is not installed here" if value in NOT_INSTALLED.get(name, ()) else "is unknown"
        raise ConfigError(f"backend.{name}: {value!r} {reason}; choose one of: {listed}")
