"""Mixture of experts: router, grouped experts, and what a trainer needs to keep them in balance.

Names are loaded on first use, so that `MoEConfig` can be had without importing torch.
"""

from typing import TYPE_CHECKING

from automimo.lazy import lazy_names

if TYPE_CHECKING:
    from automimo.moe.config import EXPERT_BACKENDS, SCORE_FUNCTIONS, MoEConfig
    from automimo.moe.deepep import DeepEPDispatcher
    from automimo.moe.dispatcher import AllToAllDispatcher, Dispatcher
    from automimo.moe.experts import GroupedExperts
    from automimo.moe.fsdp_sync import MoEFSDPSyncMixin
    from automimo.moe.gate import Documents, Gate, RouterStats, Routing
    from automimo.moe.layer import MoE
    from automimo.moe.metrics import load_metrics
    from automimo.moe.model_hooks import (
        attach_aux_loss,
        expert_load,
        moe_layers,
        reset_expert_load,
        set_aux_loss_scale,
        sum_expert_load,
        update_router_biases,
    )
    from automimo.moe.recompute import router_frozen_contexts, selective_contexts
    from automimo.moe.split_experts import MoESplitExpertsStateDictMixin

_HOMES = {
    "config": ("EXPERT_BACKENDS", "SCORE_FUNCTIONS", "MoEConfig"),
    "deepep": ("DeepEPDispatcher",),
    "dispatcher": ("AllToAllDispatcher", "Dispatcher"),
    "experts": ("GroupedExperts",),
    "fsdp_sync": ("MoEFSDPSyncMixin",),
    "gate": ("Documents", "Gate", "RouterStats", "Routing"),
    "layer": ("MoE",),
    "metrics": ("load_metrics",),
    "model_hooks": (
        "attach_aux_loss",
        "expert_load",
        "moe_layers",
        "reset_expert_load",
        "set_aux_loss_scale",
        "sum_expert_load",
        "update_router_biases",
    ),
    "recompute": ("router_frozen_contexts", "selective_contexts"),
    "split_experts": ("MoESplitExpertsStateDictMixin",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "EXPERT_BACKENDS",
    "SCORE_FUNCTIONS",
    "AllToAllDispatcher",
    "DeepEPDispatcher",
    "Dispatcher",
    "Documents",
    "Gate",
    "GroupedExperts",
    "MoE",
    "MoEConfig",
    "MoEFSDPSyncMixin",
    "MoESplitExpertsStateDictMixin",
    "RouterStats",
    "Routing",
    "attach_aux_loss",
    "expert_load",
    "load_metrics",
    "moe_layers",
    "reset_expert_load",
    "router_frozen_contexts",
    "selective_contexts",
    "set_aux_loss_scale",
    "sum_expert_load",
    "update_router_biases",
]

__getattr__, __dir__ = lazy_names(__name__, _HOME_OF)
