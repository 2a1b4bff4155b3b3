"""What one rank sends and gathers during an optimizer step, counted on its part of the model without running it.

Over the FSDP units of the model `count_traffic` repeats what FSDP2 does around forward and backward: which unit is
gathered when, kept or freed, and when its gradients are reduced; and what its layers exchange, tokens and heads. So a
change of the layout shows here without a second place that knows it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from automimo.distributed.world import world_size
from automimo.mimo_v2_flash.attention import MiMoV2FlashAttention
from automimo.mimo_v2_flash.backbone import MiMoV2FlashBlock
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.moe import AllToAllDispatcher, MoE, MoEConfig, moe_layers
from automimo.training.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    FP32,
    FP64,
    INT64,
    REDUCE_SCATTER,
    Collective,
    MicroBatch,
    Traffic,
)
from automimo.training.fsdp_units import Unit, fsdp_units


@dataclass(frozen=True)
class _Layer:
    """A block's units, how its tokens travel, and which of its tensors have a gradient in backward: k or v, any of q, k
    and v, what attention returns, rows that go to the experts, results that come back, what the router returns, what
    the block returns."""

    block: Unit
    attention: MiMoV2FlashAttention
    moe: MoEConfig | None
    gate: Unit | None
    experts: Unit | None
    dispatcher: AllToAllDispatcher | None
    keys_grad: bool
    heads_grad: bool
    attended_grad: bool
    rows_grad: bool
    results_grad: bool
    gate_grad: bool
    grad: bool


def count_traffic(model: MiMoV2FlashForCausalLM, micro_batches: Sequence[MicroBatch]) -> Traffic:
    """The collectives of one optimizer step of `training.loop`, without evaluation and saving.

    `model` is what `parallelize` returned, with `requires_grad` as it is trained; nothing of it is changed. Everything
    is exact but the rows of the all-to-alls, which depend on the router and are taken to be balanced.
    """
    traffic = Traffic()
    traffic.collectives += _control_before()
    step = _Step(model, traffic)
    deferred = model.backend.enable_fsdp_optimizations
    if deferred and len(micro_batches) > 1:
        for unit in step.units():
            unit.reshard = False  # see MoEFSDPSyncMixin
    for number, micro_batch in enumerate(micro_batches, 1):
        step.run(micro_batch, sync=number == len(micro_batches) or not deferred)
    traffic.collectives += _control_after(model)
    return traffic


def _control_before() -> Iterator[Collective]:
    ranks = world_size()
    yield Collective(ALL_REDUCE, "control", ranks, FP64)  # whether any rank was asked to stop
    yield Collective(ALL_REDUCE, "control", ranks, 2 * FP64)  # targets and tokens of the step


def _control_after(model: nn.Module) -> Iterator[Collective]:
    ranks = world_size()
    plain = [p.numel() for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if plain:  # attention sinks; and for each whether it has a gradient
        yield Collective(ALL_REDUCE, "gradients", ranks, (len(plain) + sum(plain)) * FP32)
    yield Collective(ALL_REDUCE, "control", ranks, FP64)  # gradient norm
    yield Collective(ALL_REDUCE, "control", ranks, FP64)  # loss
    layers = moe_layers(model).values()
    if layers:
        loads = sum(layer.config.n_routed_experts for layer in layers)
        yield Collective(ALL_REDUCE, "control", ranks, loads * INT64)  # tokens per layer and expert


class _Step:
    """The units of a model and what FSDP2 does with them; the names of its methods are FSDP's own."""

    def __init__(self, model: MiMoV2FlashForCausalLM, traffic: Traffic) -> None:
        self.traffic = traffic
        self.recompute = model.model.activation_checkpointing
        units = fsdp_units(model)
        self.width = model.config.hidden_size
        self.embedding, self.head = units[model.model.embed_tokens], units[model.lm_head]
        grad = self.embedding_grad = self.embedding.trained > 0
        self.layers = []
        for block in model.model.blocks():
            layer = _layer(block, units, grad)
            self.layers.append(layer)
            grad = layer.grad
        self.order: list[Unit] = []  # of the ends of forward, which FSDP's own prefetch goes back along
        self.gathered = self.buffer = self.summed = self.reducing = 0  # bytes

    def run(self, micro_batch: MicroBatch, *, sync: bool) -> None:
        """Forward and backward of one micro-batch; with `sync` gradients are reduced and parameters freed after."""
        for unit in self.units():
            unit.done = False
        self._forward(micro_batch)
        self._backward(micro_batch, sync)

    def units(self) -> Iterator[Unit]:
        yield self.embedding
        for layer in self.layers:
            yield from (unit for unit in (layer.block, layer.gate, layer.experts) if unit is not None)
        yield self.head

    def _forward(self, micro_batch: MicroBatch) -> None:
        self._pre_forward(self.embedding)
        self._post_forward(self.embedding)
        for layer in self.layers:
            self._pre_forward(layer.block)
            self._attend(layer, micro_batch)
            if layer.gate is not None:
                self._pre_forward(layer.gate)
                self._balance(layer, micro_batch)
                self._post_forward(layer.gate)
            if layer.experts is not None:
                self._pre_forward(layer.experts)
                self._dispatch(layer, micro_batch)
                self._post_forward(layer.experts)
            self._post_forward(layer.block)
        self._pre_forward(self.head)
        self._post_forward(self.head)
        self._free_buffer()

    def _backward(self, micro_batch: MicroBatch, sync: bool) -> None:
        self._pre_backward(self.head)
        self._post_backward(self.head, sync)
        for layer in reversed(self.layers):
            if layer.grad:
                self._pre_backward(layer.block)
                if self.recompute == "full":
                    self._attend(layer, micro_batch)
                self._backward_experts(layer, micro_batch, sync)
                self._backward_attention(layer, micro_batch)
                self._post_backward(layer.block, sync)
        if self.embedding_grad:
            self._pre_backward(self.embedding)
        for unit in self.units():  # whose inputs have no gradient
            if not unit.done:
                self._post_backward(unit, sync)
        if sync:
            for unit in self.units():
                if unit.pending:  # gathered ahead for nobody
                    unit.pending = False
                    self.gathered -= unit.buffer
                unit.places.clear()
            self.order.clear()
            self.reducing = 0

    def _backward_experts(self, layer: _Layer, micro_batch: MicroBatch, sync: bool) -> None:
        if layer.experts is None or layer.gate is None:
            return
        if layer.results_grad or layer.gate_grad:
            self._pre_backward(layer.experts)
        if self.recompute != "none":
            for unit in (layer.gate, layer.experts):  # forward again inside backward: gathered, and not freed
                self._unshard(unit)
                self._wait(unit, forward=False)
            self._balance(layer, micro_batch)
            if self.recompute == "full":
                self._dispatch(layer, micro_batch)
        if layer.dispatcher is not None:
            own, arrived = self._rows(layer, micro_batch)
            if layer.results_grad:
                self._all_to_all(layer.dispatcher, own)
            if layer.rows_grad:
                self._all_to_all(layer.dispatcher, arrived)
        self._post_backward(layer.experts, sync)
        if layer.gate_grad:
            self._pre_backward(layer.gate)
        self._post_backward(layer.gate, sync)

    def _attend(self, layer: _Layer, micro_batch: MicroBatch) -> None:
        """Where a stream is shared: tokens to heads and back, or the halo of a layer with a window."""
        ranks = layer.attention.context_size
        if ranks == 1:
            return
        if layer.attention.window is not None and micro_batch.halo is not None:
            self._halo(layer, micro_batch.halo[0])
            return
        self._collective(ALL_TO_ALL, "heads", ranks, self._heads_there(layer, micro_batch))
        self._collective(ALL_TO_ALL, "heads", ranks, self._heads_back(layer, micro_batch))

    def _backward_attention(self, layer: _Layer, micro_batch: MicroBatch) -> None:
        ranks = layer.attention.context_size
        if ranks == 1:
            return
        if layer.attention.window is not None and micro_batch.halo is not None:
            if layer.keys_grad:
                self._halo(layer, micro_batch.halo[1])
            return
        if layer.attended_grad:
            self._collective(ALL_TO_ALL, "heads", ranks, self._heads_back(layer, micro_batch))
        if layer.heads_grad:
            self._collective(ALL_TO_ALL, "heads", ranks, self._heads_there(layer, micro_batch))

    def _halo(self, layer: _Layer, rows: int) -> None:
        attention = layer.attention
        row = attention.num_kv_heads * (attention.head_dim + attention.v_head_dim) * self.embedding.itemsize
        self._collective(ALL_TO_ALL, "halos", attention.context_size, rows * row, to_self=False)

    def _heads_there(self, layer: _Layer, micro_batch: MicroBatch) -> int:
        """Bytes of q, k and v."""
        attention = layer.attention
        kv_heads = max(attention.num_kv_heads, attention.context_size)  # some are sent to several ranks
        row = attention.num_heads * attention.head_dim + kv_heads * (attention.head_dim + attention.v_head_dim)
        return micro_batch.places * row * self.embedding.itemsize

    def _heads_back(self, layer: _Layer, micro_batch: MicroBatch) -> int:
        """Bytes of what attention returns."""
        attention = layer.attention
        return micro_batch.places * attention.num_heads * attention.v_head_dim * self.embedding.itemsize

    def _balance(self, layer: _Layer, micro_batch: MicroBatch) -> None:
        """The counts of the balance loss, which is a matter of whole documents."""
        ranks = layer.attention.context_size
        if ranks > 1 and layer.moe is not None and layer.moe.aux_loss_coeff > 0:
            payload = micro_batch.documents * (layer.moe.n_routed_experts + 1) * INT64
            self._collective(ALL_REDUCE, "control", ranks, payload)

    def _dispatch(self, layer: _Layer, micro_batch: MicroBatch) -> None:
        """Numbers of rows, rows to the experts, results back."""
        if layer.dispatcher is None:
            return
        own, arrived = self._rows(layer, micro_batch)
        self._all_to_all(layer.dispatcher, layer.dispatcher.n_experts * INT64)
        self._all_to_all(layer.dispatcher, own)
        self._all_to_all(layer.dispatcher, arrived)

    def _rows(self, layer: _Layer, micro_batch: MicroBatch) -> tuple[int, int]:
        assert layer.moe is not None  # it has a dispatcher
        row = layer.moe.n_activated_experts * self.width * self.embedding.itemsize
        return micro_batch.tokens * row, round(micro_batch.arriving * row)

    def _all_to_all(self, dispatcher: AllToAllDispatcher, payload: int) -> None:
        self._collective(ALL_TO_ALL, "tokens", dispatcher.ranks, payload)

    def _pre_forward(self, unit: Unit) -> None:
        self._unshard(unit)
        self._wait(unit, forward=True)
        for later in unit.next_forward:
            self._unshard(later)

    def _post_forward(self, unit: Unit) -> None:
        if unit.reshard:
            self._reshard(unit)
        unit.places.append(len(self.order))
        self.order.append(unit)

    def _pre_backward(self, unit: Unit) -> None:
        self._prefetch_backward(unit)
        self._wait(unit, forward=False)
        if unit.next_backward:
            for earlier in unit.next_backward:
                self._prefetch_backward(earlier)
        elif unit.places and (place := unit.places.pop()) > 0:
            self._prefetch_backward(self.order[place - 1])

    def _prefetch_backward(self, unit: Unit) -> None:
        if unit.in_backward:
            self._unshard(unit)

    def _post_backward(self, unit: Unit, sync: bool) -> None:
        unit.done = True
        gradient = unit.trained * unit.itemsize
        if not sync:
            if not unit.accumulates:
                unit.accumulates = True
                self.summed += unit.trained * FP32
            self._note_gradients(gradient)
            return
        self._reshard(unit)
        if not unit.trained:
            return
        self.reducing = unit.trained * FP32
        self._note_gradients(gradient)
        if unit.accumulates:
            unit.accumulates = False
            self.summed -= unit.trained * FP32
        if unit.shards > 1:
            self._collective(REDUCE_SCATTER, "gradients", unit.shards, self.reducing)
        if unit.replicas is not None:
            self._collective(ALL_REDUCE, "gradients", unit.replicas, self.reducing // unit.shards)

    def _unshard(self, unit: Unit) -> None:
        if unit.pending or unit.whole:
            return
        unit.pending = True
        self._hold(unit.buffer)
        if unit.shards > 1:
            self._collective(ALL_GATHER, "parameters", unit.shards, unit.size)

    def _wait(self, unit: Unit, *, forward: bool) -> None:
        if not unit.pending:
            return
        if forward:
            self._free_buffer()
        unit.pending, unit.whole = False, True
        self._hold(unit.size)
        if forward:  # freed when the next unit's parameters have been taken apart
            self.buffer = unit.buffer
        else:
            self.gathered -= unit.buffer

    def _free_buffer(self) -> None:
        self.gathered, self.buffer = self.gathered - self.buffer, 0

    def _reshard(self, unit: Unit) -> None:
        if unit.whole:
            unit.whole = False
            self.gathered -= unit.size

    def _hold(self, size: int) -> None:
        self.gathered += size
        self.traffic.parameters = max(self.traffic.parameters, self.gathered)

    def _note_gradients(self, fresh: int) -> None:
        self.traffic.gradients = max(self.traffic.gradients, self.summed + self.reducing + fresh)

    def _collective(self, kind: str, what: str, ranks: int, payload: int, *, to_self: bool = True) -> None:
        self.traffic.collectives.append(Collective(kind, what, ranks, payload, to_self))


def _layer(block: MiMoV2FlashBlock, units: dict[nn.Module, Unit], grad: bool) -> _Layer:
    """`grad`: whether the stream that comes in has a gradient."""
    attention = block.self_attn
    keys = grad or any(map(_trained, (block.input_layernorm, attention.k_proj, attention.v_proj)))
    heads = keys or _trained(attention.q_proj)
    sink = attention.attention_sink_bias
    attended = heads or (sink is not None and sink.requires_grad)
    attention_grad = attended or _trained(attention.o_proj)
    rows = attention_grad or _trained(block.post_attention_layernorm)
    unit, mlp = units[block], block.mlp
    if not isinstance(mlp, MoE):
        out = rows or _trained(mlp)
        return _Layer(unit, attention, None, None, None, None, keys, heads, attended, False, False, False, out)
    dispatcher = mlp.experts.dispatcher
    gate, results = rows or _trained(mlp.gate), rows or _trained(mlp.experts)
    return _Layer(
        unit,
        attention,
        mlp.config,
        units[mlp.gate],
        units[mlp.experts],
        dispatcher if isinstance(dispatcher, AllToAllDispatcher) else None,
        keys,
        heads,
        attended,
        rows,
        results,
        gate,
        gate or results,
    )


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
