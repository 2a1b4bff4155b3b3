"""What one rank sends and gathers during an optimizer step, counted on its part of the model without running it.

The FSDP units are those that `parallelize` has made, asked for their sizes, dtypes, groups and prefetch lists. Over
them `count_traffic` repeats what FSDP2 does around forward and backward: which unit is gathered when, kept or freed,
and when its gradients are reduced. So a change of the layout shows here without a second place that knows it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from automimo.distributed.world import world_size
from automimo.mimo_v2_flash.backbone import MiMoV2FlashBlock
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.moe import AllToAllDispatcher, MoE, moe_layers

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
FP32, FP64, INT64 = 4, 8, 8


@dataclass(frozen=True)
class Collective:
    """One collective of a rank. `what`: parameters, gradients, tokens or control. `ranks`: of its group.

    payload: bytes of the whole tensor, which is the gathered one of an all-gather and what goes in of all others (of an
    all-to-all, the rows for all ranks, our own included).
    """

    kind: str
    what: str
    ranks: int
    payload: int

    @property
    def sent(self) -> float:
        """Bytes that this rank sends to others: what a ring, or a direct all-to-all, takes."""
        share = (self.ranks - 1) / self.ranks * self.payload
        return 2 * share if self.kind == ALL_REDUCE else share


@dataclass(frozen=True)
class MicroBatch:
    """tokens: of this rank. arriving: tokens of the ranks that share the experts, as a mean over them, since balanced
    routing sends each of these ranks the same number of rows."""

    tokens: int
    arriving: float


@dataclass
class Traffic:
    """Collectives in the order of the host. parameters, gradients: the most bytes of gathered parameters, and of whole
    gradients and their buffers, that exist at a time (the two may be at different times)."""

    collectives: list[Collective] = field(default_factory=list)
    parameters: int = 0
    gradients: int = 0


@dataclass(eq=False)
class Unit:
    """An FSDP unit: its sizes and policies, then where it is in the step.

    size: bytes of its whole parameters in the dtype of forward, padded to equal shards. trained: values of those that
    get a gradient, padded. itemsize: of a gathered value. replicas: None where no dimension is replicated.
    """

    size: int
    trained: int
    itemsize: int
    shards: int
    replicas: int | None
    reshard: bool
    in_backward: bool
    next_forward: list["Unit"] = field(default_factory=list)
    next_backward: list["Unit"] = field(default_factory=list)
    whole: bool = False
    pending: bool = False
    done: bool = False
    accumulates: bool = False
    places: list[int] = field(default_factory=list)

    @property
    def buffer(self) -> int:
        """Bytes that an all-gather writes to before the parameters are taken apart; one rank copies its own."""
        return self.size if self.shards > 1 else 0


@dataclass(frozen=True)
class _Layer:
    """A block's units, how its tokens travel, and which of its tensors have a gradient in backward: rows that go to the
    experts, results that come back, what the router returns, what the block returns."""

    block: Unit
    gate: Unit | None
    experts: Unit | None
    dispatcher: AllToAllDispatcher | None
    chosen: int
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
        units = _units(model)
        self.width = model.config.hidden_size
        self.embedding, self.head = units[model.model.embed_tokens], units[model.lm_head]
        grad = self.embedding_grad = self.embedding.trained > 0
        self.layers = []
        for block in model.model.layers.values():
            layer = _layer(cast("MiMoV2FlashBlock", block), units, grad)
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
            if layer.gate is not None:
                self._pre_forward(layer.gate)
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
                self._backward_experts(layer, micro_batch, sync)
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

    def _dispatch(self, layer: _Layer, micro_batch: MicroBatch) -> None:
        """Numbers of rows, rows to the experts, results back."""
        if layer.dispatcher is None:
            return
        own, arrived = self._rows(layer, micro_batch)
        self._all_to_all(layer.dispatcher, layer.dispatcher.n_experts * INT64)
        self._all_to_all(layer.dispatcher, own)
        self._all_to_all(layer.dispatcher, arrived)

    def _rows(self, layer: _Layer, micro_batch: MicroBatch) -> tuple[int, int]:
        row = layer.chosen * self.width * self.embedding.itemsize
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

    def _collective(self, kind: str, what: str, ranks: int, payload: int) -> None:
        self.traffic.collectives.append(Collective(kind, what, ranks, payload))


def _units(model: nn.Module) -> dict[nn.Module, Unit]:
    """The units by each of their modules, with what FSDP2 keeps to itself. The root has none: nothing is left for it
    that a forward pass uses."""
    states = {m: fully_shard.state(m) for m in model.modules() if isinstance(m, FSDPModule)}  # type: ignore[attr-defined]
    made: dict[Any, Unit] = {}
    for module, state in states.items():
        group = state._fsdp_param_group
        if group is None or state in made or module is model:
            continue
        shards = group.mesh_info.mesh.size(-1)
        itemsize = max((group.mp_policy.param_dtype or p.sharded_param.dtype).itemsize for p in group.fsdp_params)
        values = [p.padded_sharded_param_size.numel() * shards for p in group.fsdp_params]
        trained = [n for n, p in zip(values, group.fsdp_params, strict=True) if p.sharded_param.requires_grad]
        made[state] = Unit(
            size=sum(values) * itemsize,
            trained=sum(trained),
            itemsize=itemsize,
            shards=shards,
            replicas=group.mesh_info.mesh.size(0) if group.mesh_info.mesh.ndim > 1 else None,
            reshard=group.post_forward_mesh_info is not None,
            in_backward=group.unshard_in_backward,
        )
    for state, unit in made.items():
        unit.next_forward = [made[s] for s in state._states_to_forward_prefetch if s in made]
        unit.next_backward = [made[s] for s in state._states_to_backward_prefetch if s in made]
    return {module: made[state] for module, state in states.items() if state in made}


def _layer(block: MiMoV2FlashBlock, units: dict[nn.Module, Unit], grad: bool) -> _Layer:
    """`grad`: whether the stream that comes in has a gradient."""
    attention = grad or _trained(block.self_attn) or _trained(block.input_layernorm)
    rows = attention or _trained(block.post_attention_layernorm)
    unit, mlp = units[block], block.mlp
    if not isinstance(mlp, MoE):
        return _Layer(unit, None, None, None, 0, False, False, False, rows or _trained(mlp))
    dispatcher = mlp.experts.dispatcher
    gate, results = rows or _trained(mlp.gate), rows or _trained(mlp.experts)
    return _Layer(
        unit,
        units[mlp.gate],
        units[mlp.experts],
        dispatcher if isinstance(dispatcher, AllToAllDispatcher) else None,
        mlp.config.n_activated_experts,
        rows,
        results,
        gate,
        gate or results,
    )


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
