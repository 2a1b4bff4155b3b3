"""`automimo train --dry-run --world-size N`: what one of N ranks would keep, gather and send, found out in one process.

The rank's part of the real model is laid out without memory, in a process group whose other ranks are only pretended.
"""

import gc
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from rich.console import Console
from torch.distributed.tensor import DTensor

from automimo.attention import choose_halo
from automimo.data.batches import share_rows
from automimo.distributed.context.partition import chunks_of, padded_lengths
from automimo.distributed.local import local_tensor
from automimo.distributed.mesh import ParallelSizes, build_meshes
from automimo.distributed.world import is_distributed
from automimo.errors import DistributedError
from automimo.machine import GIB
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.presets import preset_config
from automimo.mimo_v2_flash.source import config_values, resolve_folder
from automimo.moe import AllToAllDispatcher, moe_layers
from automimo.training.collectives import Collective, MicroBatch, Traffic
from automimo.training.optimizer import parameter_groups, select_trainable
from automimo.training.place import Place
from automimo.training.recipe import Recipe, check_schedule
from automimo.training.setup import lay_out, parallel_sizes
from automimo.training.summary import (
    MemoryEstimate,
    ModelSize,
    activation_bytes,
    describe_memory,
    describe_model,
    describe_sizes,
    model_size,
    plural,
    short_number,
)
from automimo.training.traffic import count_traffic


@dataclass(frozen=True)
class Part:
    """Numbers of values that a rank keeps: its shards of what all tokens use, of experts, and what is whole on every
    rank (attention sinks, buffers). trained: of them, those with gradient and optimizer state."""

    dense: int
    experts: int
    whole: int
    trained: int


@dataclass(frozen=True)
class Rehearsal:
    """One rank of `sizes`: its part, its micro-batches of a step, and the step's collectives."""

    rank: int
    sizes: ParallelSizes
    config: MiMoV2FlashConfig
    size: ModelSize
    part: Part
    micro_batches: list[MicroBatch]
    traffic: Traffic


def run_rehearsal(recipe: Recipe, world: int, console: Console | None = None) -> int:
    """Print what rank 0 of `world` would do; returns the exit code 0. Needs neither data nor weights, writes nothing.

    Raises ConfigError, with the numbers, where the ranks cannot share the work as the recipe says.
    """
    console = console or Console()
    for line in describe_rehearsal(recipe, rehearse(recipe, world)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def rehearse(recipe: Recipe, world: int, rank: int = 0) -> Rehearsal:
    """Lay out the model of `recipe` as `rank` of `world` has it and count. Rows are taken to be full.

    Raises ConfigError, CheckpointError, and DistributedError in a process that belongs to a group already.
    """
    if recipe.train.steps is not None:
        check_schedule(recipe.optim, recipe.train.steps)
    with _config_folder(recipe) as folder:
        sizes = parallel_sizes(recipe, world, config_values(folder).get("n_routed_experts"))
        with pretended_ranks(world, rank):
            model = lay_out(recipe, folder, build_meshes(sizes, "cpu"))
            result = _count(recipe, model, sizes, rank)
            # FSDP's modules refer to each other in circles, and with them to the groups that end now.
            del model
            gc.collect()
    return result


def _count(recipe: Recipe, model: MiMoV2FlashForCausalLM, sizes: ParallelSizes, rank: int) -> Rehearsal:
    trainable, _ = select_trainable(model, recipe.model, recipe.moe)
    # Its patterns are checked.
    parameter_groups({name: p for name, p in model.named_parameters() if p.requires_grad}, recipe.optim)
    train = recipe.train
    micro_batches = share_of_rank(model, train.batch, train.micro_batch, recipe.data.sequence_length, rank, sizes)
    return Rehearsal(
        rank,
        sizes,
        model.config,
        model_size(model, trainable),
        part_of_rank(model),
        micro_batches,
        count_traffic(model, micro_batches),
    )


@contextmanager
def pretended_ranks(world: int, rank: int) -> Iterator[None]:
    """A default process group in which this process is `rank` of `world` and collectives do nothing.

    Raises DistributedError where there is a group already.
    """
    if is_distributed():
        raise DistributedError("a rehearsal needs a process of its own, but this one is a rank of a running job")
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch puts the rank before tracebacks


@contextmanager
def _config_folder(recipe: Recipe) -> Iterator[Path]:
    """A folder with the config.json of the recipe's model; of a preset a temporary one with nothing else in it."""
    if recipe.model.path is not None:
        yield resolve_folder(recipe.model.path, weights=False)
        return
    assert recipe.model.preset is not None  # the recipe has one of the two
    config = preset_config(recipe.model.preset)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(config.to_diff_dict()), encoding="utf-8")
        yield folder


def share_of_rank(
    model: MiMoV2FlashForCausalLM, batch: int, micro_batch: int, row: int, rank: int, sizes: ParallelSizes
) -> list[MicroBatch]:
    """The micro-batches of a rank in a step of `batch` rows, each of which is one document of `row` tokens."""
    dispatchers = [layer.experts.dispatcher for layer in moe_layers(model).values()]
    others = [rank]
    if dispatchers and isinstance(dispatchers[0], AllToAllDispatcher):
        others = dist.get_process_group_ranks(dispatchers[0].group)

    def rows(place: Place) -> list[int]:
        return [len(own) for own in share_rows(range(batch), micro_batch, place.data_rank, place.data_ranks)]

    place = Place.of(rank, sizes)
    padded = padded_lengths([row], sizes.context)[0]
    tokens = [[_tokens_of(Place.of(r, sizes), row) * own for own in rows(Place.of(r, sizes))] for r in others]
    arriving = [sum(all_) / len(all_) for all_ in zip(*tokens, strict=True)]
    idle = padded_lengths([1], sizes.context)[0]  # one place of padding
    window = next(
        (block.self_attn.window for block in model.model.blocks() if block.self_attn.window is not None), None
    )

    @cache
    def halo(length: int, documents: int) -> tuple[int, int] | None:
        if window is None or sizes.context == 1:
            return None
        boundaries = range(0, (documents + 1) * length, length)
        plan = choose_halo(boundaries, window, sizes.context, place.context_rank, "cpu")
        return None if plan is None else (sum(plan.sent), plan.halo_rows)

    return [
        MicroBatch(
            tokens=own * _tokens_of(place, row),
            places=(own * padded or idle) // sizes.context,
            arriving=mean,
            documents=max(own, 1),
            halo=halo(padded if own else idle, max(own, 1)),
        )
        for own, mean in zip(rows(place), arriving, strict=True)
    ]


def _tokens_of(place: Place, row: int) -> int:
    """Of a document of `row` tokens, those that fall to a context rank; the others are padding."""
    padded = padded_lengths([row], place.context_ranks)
    if place.context_ranks == 1:
        return row
    chunks = chunks_of([0, *padded], place.context_ranks, place.context_rank)
    return sum(min(stop, row) - min(start, row) for _, start, stop in chunks.tolist())


def part_of_rank(model: MiMoV2FlashForCausalLM) -> Part:
    """What this rank keeps of a model that `parallelize` has shared out."""
    dense = experts = trained = 0
    whole = sum(buffer.numel() for buffer in model.buffers())
    for name, parameter in model.named_parameters():
        values = local_tensor(parameter).numel()
        if ".experts." in name:
            experts += values
        elif isinstance(parameter, DTensor):
            dense += values
        else:
            whole += values
        trained += values if parameter.requires_grad else 0
    return Part(dense, experts, whole, trained)


def memory_of(recipe: Recipe, rehearsal: Rehearsal) -> MemoryEstimate:
    """Bytes of the rank: weights, gradients and AdamW's moments are fp32 and counted, as is what is gathered;
    activations are estimated."""
    part, traffic = rehearsal.part, rehearsal.traffic
    return MemoryEstimate(
        weights=4 * (part.dense + part.experts + part.whole),
        gradients=4 * part.trained,
        optimizer=8 * part.trained,
        activations=activation_bytes(recipe, rehearsal.config, rehearsal.sizes),
        gathered=traffic.parameters + traffic.gradients,
    )


def describe_rehearsal(recipe: Recipe, rehearsal: Rehearsal) -> list[str]:
    """What `run_rehearsal` prints."""
    part, micro, traffic = rehearsal.part, rehearsal.micro_batches, rehearsal.traffic
    offloaded = "; weights, gradients and AdamW on the CPU" if recipe.parallel.offload else ""
    return [
        describe_model(recipe, rehearsal.config, rehearsal.size),
        describe_sizes(rehearsal.sizes),
        f"rank     {rehearsal.rank:,} keeps {short_number(part.dense)} dense values, {short_number(part.experts)} of "
        f"experts and {short_number(part.whole)} that every rank has, "
        f"{(part.dense + part.experts + part.whole) * 4 / GIB:.2f} GiB in fp32; trains {short_number(part.trained)}",
        f"step     {plural(len(micro), 'micro-batch', 'es')} of up to {plural(recipe.train.micro_batch, 'row')}, "
        f"{sum(m.tokens for m in micro):,} tokens of this rank",
        describe_memory(memory_of(recipe, rehearsal)) + offloaded,
        f"gathered at most {traffic.parameters / GIB:.2f} GiB of parameters and {traffic.gradients / GIB:.2f} GiB of "
        "gradients at a time",
        *_describe_traffic(traffic.collectives),
        "counted  for full rows and balanced routing, without evaluation and saving; bytes are those that a rank sends "
        "to others, by rings (as many come in)",
        "dry run  nothing trained, nothing written",
    ]


def _describe_traffic(collectives: Sequence[Collective]) -> list[str]:
    lines = []
    for kind, what in dict.fromkeys((c.kind, c.what) for c in _in_order(collectives)):
        calls = [c for c in collectives if (c.kind, c.what) == (kind, what)]
        groups = ", ".join(f"{n:,} among {ranks:,} ranks" for ranks, n in Counter(c.ranks for c in calls).items())
        sent = _size(sum(c.sent for c in calls))
        lines.append(f"traffic  {plural(len(calls), kind)} of {what}: {sent} per step ({groups})")
    return lines


def _in_order(collectives: Iterable[Collective]) -> list[Collective]:
    order = {"parameters": 0, "gradients": 1, "tokens": 2, "heads": 3, "halos": 4, "control": 5}
    return sorted(collectives, key=lambda c: order[c.what])


def _size(size: float) -> str:
    for unit, word in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {word}"
    return f"{size:,.0f} bytes"
