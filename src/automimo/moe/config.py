"""Configuration of a mixture-of-experts layer. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

from automimo.errors import ConfigError

SCORE_FUNCTIONS = ("sigmoid", "sigmoid_with_bias", "softmax", "softmax_with_bias")
EXPERT_BACKENDS = ("torch", "torch_mm")
_DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16"}
_DTYPES |= {"fp16": "float16", "half": "float16", "float64": "float64", "double": "float64"}


@dataclass(frozen=True)
class MoEConfig:
    """Router and experts of one layer. Validated on construction; a wrong value is a `ConfigError`.

    n_routed_experts: experts of the layer (E).
    n_shared_experts: None or 0; no MiMo-V2 model has a shared expert.
    n_activated_experts: experts each token goes to (K).
    n_expert_groups, n_limited_groups: the experts form this many equal groups, of which the best few are kept per token
        (1 and 1: no group step).
    train_gate: False freezes the router weight.
    gate_bias_update_factor: step of the correction bias after each optimizer step; 0 leaves it alone.
    aux_loss_coeff: factor of the balance loss; 0 means none.
    score_func: `sigmoid_with_bias` (MiMo-V2), `sigmoid`, `softmax` or `softmax_with_bias`. Softmax is over all experts;
        with `norm_topk_prob` that is the same as a softmax over the chosen ones.
    route_scale: factor of the router weights; None means 1.
    dim, inter_dim, moe_inter_dim: hidden width, width of the dense layers, width of one expert.
    norm_topk_prob: divide the weights of a token by their sum.
    apply_router_weight_after_down: accepted for the files that carry it. The weight multiplies the expert's output in
        every MiMo-V2 model, and since the down projection has no bias the other order is the same function.
    force_e_score_correction_bias: hold a correction bias although neither the score function nor an update asks for it.
    dtype: of the expert weights. The router weight and the correction bias are always float32.
    """

    n_routed_experts: int
    n_shared_experts: int | None
    n_activated_experts: int
    n_expert_groups: int
    n_limited_groups: int
    train_gate: bool
    gate_bias_update_factor: float
    aux_loss_coeff: float
    score_func: str
    route_scale: float | None
    dim: int
    inter_dim: int
    moe_inter_dim: int
    norm_topk_prob: bool
    apply_router_weight_after_down: bool = True
    force_e_score_correction_bias: bool = False
    dtype: str = "bfloat16"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping; unknown and missing fields are a `ConfigError` that lists them."""
        known = {field.name: field for field in fields(cls)}
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ConfigError(f"MoEConfig has no field {_list(unknown)}; its fields are {_list(known)}")
        missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
        if missing:
            raise ConfigError(f"MoEConfig needs {_list(missing)}")
        return cls(**values)

    def __post_init__(self) -> None:
        positive = ("n_routed_experts", "n_activated_experts", "n_expert_groups", "n_limited_groups")
        for name in (*positive, "dim", "inter_dim", "moe_inter_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"MoEConfig.{name} must be a positive integer, got {value!r}")
        for name in ("gate_bias_update_factor", "aux_loss_coeff"):
            value = getattr(self, name)
            if not _is_finite_number(value) or value < 0:
                raise ConfigError(f"MoEConfig.{name} must be a finite number of at least 0, got {value!r}")
        if self.route_scale is not None and not _is_finite_number(self.route_scale):
            raise ConfigError(f"MoEConfig.route_scale must be a finite number or None, got {self.route_scale!r}")
        flags = ("train_gate", "norm_topk_prob", "apply_router_weight_after_down", "force_e_score_correction_bias")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"MoEConfig.{name} must be true or false, got {getattr(self, name)!r}")
        if self.n_shared_experts not in (None, 0):
            raise ConfigError(
                f"MoEConfig.n_shared_experts is {self.n_shared_experts!r}: no MiMo-V2 model has shared experts and "
                "none are implemented; set it to null"
            )
        if self.score_func not in SCORE_FUNCTIONS:
            raise ConfigError(f"MoEConfig.score_func is {self.score_func!r}; the choices are {_list(SCORE_FUNCTIONS)}")
        dtype = _DTYPES.get(str(self.dtype).removeprefix("torch."))
        if dtype is None:
            raise ConfigError(
                f"MoEConfig.dtype is {self.dtype!r}; the choices are {_list(sorted(set(_DTYPES.values())))}"
            )
        object.__setattr__(self, "dtype", dtype)
        self._check_groups()
        if self.gate_bias_update_factor > 0 and not self.train_gate:
            raise ConfigError(
                f"MoEConfig.gate_bias_update_factor is {self.gate_bias_update_factor} but train_gate is false: a "
                "frozen router must not be rebalanced; set the factor to 0 or train the gate"
            )

    def _check_groups(self) -> None:
        if self.n_routed_experts % self.n_expert_groups:
            raise ConfigError(
                f"{self.n_routed_experts} experts (n_routed_experts) cannot be split into {self.n_expert_groups} equal "
                "groups (n_expert_groups)"
            )
        if self.n_limited_groups > self.n_expert_groups:
            raise ConfigError(
                f"n_limited_groups is {self.n_limited_groups} but there are only {self.n_expert_groups} groups "
                "(n_expert_groups)"
            )
        reachable = self.n_limited_groups * (self.n_routed_experts // self.n_expert_groups)
        if self.n_activated_experts > reachable:
            raise ConfigError(
                f"n_activated_experts is {self.n_activated_experts} but a token can reach only {reachable} experts: "
                f"{self.n_limited_groups} of {self.n_expert_groups} groups of {self.n_routed_experts} experts"
            )

    @property
    def has_correction_bias(self) -> bool:
        """Whether the router holds a correction bias. Where one exists it takes part in the choice of experts."""
        return (
            self.score_func.endswith("_with_bias")
            or self.gate_bias_update_factor > 0
            or self.force_e_score_correction_bias
        )


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _list(names: object) -> str:
    return ", ".join(names)  # type: ignore[arg-type]
