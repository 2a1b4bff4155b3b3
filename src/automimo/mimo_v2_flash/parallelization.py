"""Context parallelism on a model: finds its attention layers and joins each with the ranks that share its streams."""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh

from automimo.errors import ConfigError

# Attribute of a model: the process group its attention was set up for, None for none. Absent before any setup.
_CONFIGURED_GROUP = "_mimo_te_cp_configured_group"


def _unwrap_checkpoint_module(module: nn.Module) -> nn.Module:
    """The module beneath any activation-checkpoint wrappers."""
    while isinstance(module, CheckpointWrapper):
        module = cast("nn.Module", module._checkpoint_wrapped_module)
    return module


def ensure_mimo_te_context_parallel(model: nn.Module, cp_mesh: DeviceMesh | None) -> None:
    """`setup_mimo_te_context_parallel`, unless it was done for this process group; nothing without several ranks."""
    if cp_mesh is None or cp_mesh.size() <= 1:
        return
    if model.__dict__.get(_CONFIGURED_GROUP) is cp_mesh.get_group():
        return
    setup_mimo_te_context_parallel(model, cp_mesh)


def setup_mimo_te_context_parallel(model: nn.Module, cp_mesh: DeviceMesh | None) -> None:
    """Join every attention layer of `model` with the ranks of `cp_mesh`, through its `setup_cp_attention`.

    model: a whole model or one pipeline stage, wrapped for activation checkpointing or not. The attention decides what
    its backend exchanges; on GPUs all layers get the same communication stream. `cp_mesh` has one dimension; a single
    rank (or None) is only noted: layers that were joined before stay so.

    Raises ConfigError (a ValueError) for a model without layers named `self_attn`, for one of them without the hook,
    and as the hook (heads that the ranks cannot share). No layer is touched before all are known to have the hook.
    """
    setattr(model, _CONFIGURED_GROUP, None)
    if cp_mesh is None or cp_mesh.size() <= 1:
        return
    hooks = [_cp_hook(name, module) for name, module in model.named_modules() if name.endswith("self_attn")]
    if not hooks:
        raise ConfigError(
            f"{type(model).__name__} has no attention layer: context parallelism looks for modules named 'self_attn'"
        )
    stream = torch.cuda.Stream() if cp_mesh.device_type == "cuda" else None
    for hook in hooks:
        hook(cp_mesh, stream)
    setattr(model, _CONFIGURED_GROUP, cp_mesh.get_group())


def _cp_hook(name: str, module: nn.Module) -> Any:
    attention = _unwrap_checkpoint_module(module)
    hook = getattr(attention, "setup_cp_attention", None)
    if not callable(hook):
        raise ConfigError(
            f"{name}: {type(attention).__name__} has no setup_cp_attention, so it cannot share a sequence with other "
            "ranks: use attention layers that have it, or set parallel.context to 1"
        )
    return hook
