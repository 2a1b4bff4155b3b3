"""From a model to one rank's part of it: experts, context, activation checkpointing, compilation, FSDP2, in this
order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from automimo.distributed.mesh import CP, EP, EP_SHARD, Meshes
from automimo.errors import ConfigError
from automimo.mimo_v2_flash.backbone import MiMoV2FlashBlock
from automimo.mimo_v2_flash.layers import MiMoV2RMSNorm, SwiGLU
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.parallelization import setup_mimo_te_context_parallel
from automimo.moe import AllToAllDispatcher, DeepEPDispatcher, Dispatcher, MoE, moe_layers


@dataclass(frozen=True)
class ParallelConfig:
    """How a rank holds and computes its part.

    dtype: of forward and backward. Parameters, gradients and their reduction are fp32, as are router and sinks.
    reshard: free the gathered parameters of a block after its forward pass and gather them again in backward; False
        keeps them, which saves that communication and costs the memory of the whole model (in `dtype`).
    prefetch: blocks whose parameters are gathered ahead of time; 0 leaves it to FSDP.
    offload: parameters, gradients and optimizer state live on the CPU and visit the GPU.
    activation_checkpointing: `none`, `full`, `selective`.
    compile: torch.compile the norms and dense MLPs of every block.
    """

    dtype: torch.dtype = torch.float32
    reshard: bool = True
    prefetch: int = 1
    offload: bool = False
    activation_checkpointing: str = "none"
    compile: bool = False


def parallelize(model: MiMoV2FlashForCausalLM, meshes: Meshes, config: ParallelConfig) -> None:
    """Turn `model`, on the meta device or with the same weights on every rank, into this rank's part of it, in place.

    Afterwards parameters are DTensors (attention sinks, which are tiny and always fp32, stay whole on every rank), and
    a forward and backward pass is a collective of all ranks. Gradients come out *summed* over the ranks. A model from
    the meta device has its memory after `model.to_empty(device=...)`.

    Raises ConfigError for what is not supported.
    """
    _refuse(meshes, config)
    _share_experts(model, meshes, config)
    setup_mimo_te_context_parallel(model, meshes.dense[CP])
    model.model.set_activation_checkpointing(config.activation_checkpointing)
    if config.compile:
        compile_blocks(model)
    _shard(model, meshes, config)


def _refuse(meshes: Meshes, config: ParallelConfig) -> None:
    if meshes.sizes.pipeline > 1:
        raise ConfigError(f"parallel.pipeline is {meshes.sizes.pipeline}; this version has no pipeline parallelism")
    if config.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"model.dtype {config.dtype} cannot be trained; choose float32 or bfloat16")


def _share_experts(model: MiMoV2FlashForCausalLM, meshes: Meshes, config: ParallelConfig) -> None:
    """Expert parallelism: each rank along `ep` keeps its share of every layer's experts, and tokens travel to them."""
    if meshes.expert is None:
        return
    mesh = meshes.expert[EP]
    dispatcher = _dispatcher(model, mesh, config)
    for layer in moe_layers(model).values():
        for name, stack in list(layer.experts.named_parameters()):
            # Every rank has the whole stack (or none of it, on meta) and cuts out its own part: no communication.
            shared = distribute_tensor(stack.data, mesh, [Shard(0)], src_data_rank=None)
            layer.experts.register_parameter(name, nn.Parameter(shared, requires_grad=stack.requires_grad))
        layer.experts.dispatcher = dispatcher


def _dispatcher(model: MiMoV2FlashForCausalLM, mesh: DeviceMesh, config: ParallelConfig) -> Dispatcher:
    """One for all layers, which have equally many experts."""
    moe = model.model.moe_config
    assert moe is not None  # parallel.expert was refused for a model without experts
    if model.backend.dispatcher == "deepep":
        return DeepEPDispatcher(moe.n_routed_experts, mesh.get_group(), moe.dim, config.dtype)
    return AllToAllDispatcher(moe.n_routed_experts, mesh.get_group())


def compile_blocks(model: MiMoV2FlashForCausalLM) -> None:
    """The norms and dense MLPs of every block, which is where plain tensor code is left to fuse.

    Not whole blocks: attention and experts are autograd functions over hand-made tiles and groups, whose loops the
    compiler would unroll (minutes per length of text), and its rule for grouped_mm knows bf16 only.
    """
    for block in model.model.blocks():
        for module in block.modules():
            if isinstance(module, MiMoV2RMSNorm | SwiGLU):
                module.compile(dynamic=True)


def _shard(model: MiMoV2FlashForCausalLM, meshes: Meshes, config: ParallelConfig) -> None:
    """FSDP2 units: experts and router of a block, the block, the embedding, head and last norm, the root."""
    mesh = meshes.fsdp
    reduced = torch.float32
    # Inputs are never cast: the stream has the compute dtype from the embedding on, router weights and rotary tables
    # are fp32 on purpose.
    policy = MixedPrecisionPolicy(param_dtype=config.dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduced, cast_forward_inputs=False)
    offload: OffloadPolicy = (
        CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if config.offload else OffloadPolicy()
    )
    whole = {p for name, p in model.named_parameters() if name.endswith(".attention_sink_bias")}

    def unit(module: nn.Module | list[nn.Module], policy: MixedPrecisionPolicy, reshard: bool = config.reshard) -> None:
        fully_shard(
            module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload,
            ignored_params=whole,
        )  # fmt: skip

    for block in model.model.blocks():
        if isinstance(block.mlp, MoE):
            expert_mesh = mesh if meshes.expert is None else meshes.expert[EP_SHARD]
            fully_shard(
                block.mlp.experts, mesh=expert_mesh, reshard_after_forward=config.reshard, mp_policy=policy,
                offload_policy=offload, shard_placement_fn=_expert_placement(expert_mesh, meshes),
            )  # fmt: skip
            unit(block.mlp.gate, exact)
        unit(block, policy)
    unit(model.model.embed_tokens, policy)
    # Needed again at once when the backward pass begins.
    unit([model.model.norm, model.lm_head], policy, reshard=False)
    unit(model, policy)
    for module in (model.model.embed_tokens, model.lm_head):
        # The gradient of the embedding needs no weights, and the head still has them from the forward pass.
        cast("FSDPModule", module).set_unshard_in_backward(False)
    _sum_gradients(model)
    if config.prefetch:
        _prefetch(model.model.blocks(), config.prefetch)


def _expert_placement(mesh: DeviceMesh, meshes: Meshes) -> Callable[[nn.Parameter], Shard]:
    """Experts are sharded inside each matrix (dimension 1), so that a layer may have fewer experts than ranks.

    Without expert parallelism whole experts are shared out where dimension 1 does not divide; FSDP allows an uneven
    share of dimension 0 only. Raises ConfigError where neither will do.
    """
    ranks = mesh.size(mesh.ndim - 1)

    def place(stack: nn.Parameter) -> Shard:
        if stack.shape[1] % ranks == 0:
            return Shard(1)
        if meshes.expert is None:
            return Shard(0)
        raise ConfigError(
            f"experts of {stack.shape[1]} rows cannot be shared by {ranks} ranks (the ranks of a layer divided by "
            f"parallel.expert {meshes.sizes.expert}): choose one that leaves a divisor of {stack.shape[1]}"
        )

    return place


def _sum_gradients(model: nn.Module) -> None:
    """FSDP would take the mean over its ranks. The loss is divided by the targets of all of them already, and experts
    have other ranks than the rest: a plain sum is right for both."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _prefetch(blocks: list[MiMoV2FlashBlock], ahead: int) -> None:
    """Gather the next blocks while one computes. FSDP's own prefetch follows the order of launches on the host, which
    under expert parallelism waits inside every block for the numbers of rows."""
    units: list[list[FSDPModule]] = [[m for m in block.modules() if isinstance(m, FSDPModule)] for block in blocks]
    for i, block in enumerate(blocks):
        forward = [m for later in units[i + 1 : i + 1 + ahead] for m in later]
        backward = [m for earlier in reversed(units[max(0, i - ahead) : i]) for m in reversed(earlier)]
        cast("FSDPModule", block).set_modules_to_forward_prefetch(forward)
        cast("FSDPModule", block).set_modules_to_backward_prefetch(backward)
