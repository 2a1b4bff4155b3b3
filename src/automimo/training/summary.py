"""The numbers that follow from a recipe, printed before anything is trained.

Legend: T tokens of a micro-batch, D hidden width.
"""

import math
from dataclasses import dataclass

from torch import nn

from automimo.distributed.mesh import ParallelSizes
from automimo.machine import GIB, memory_bytes
from automimo.mimo_v2_flash.backbone import MiMoV2FlashBlock
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.moe import moe_layers
from automimo.training.recipe import Recipe
from automimo.training.setup import Data, defers_sync


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters (values). `active`: used by one token, of each layer's experts the chosen ones. `experts`:
    of all experts of all layers. `largest_layer`: (expert, other) parameters of the block with the most.
    """

    total: int
    active: int
    trainable: int
    experts: int
    largest_layer: tuple[int, int]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device. Activations are counted from the shapes that a forward pass keeps.

    `gathered`: what FSDP puts together for a while, parameters in the compute dtype and gradients in fp32.
    Gradients and activations together against the peaks of benchmarks/train_step.py (fp32, 1k to 16k tokens, five
    models): 9 % too low to 19 % too high.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered


def model_size(model: nn.Module, trainable: int) -> ModelSize:
    """Count the parameters of a model (the meta device will do)."""
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = all_experts = largest = other = 0
    for layer in moe_layers(model).values():
        experts = sum(parameter.numel() for parameter in layer.experts.parameters())
        idle += experts - experts * layer.config.n_activated_experts // layer.config.n_routed_experts
        all_experts, largest = all_experts + experts, max(largest, experts)
    for module in model.modules():
        if isinstance(module, MiMoV2FlashBlock):
            values = sum(p.numel() for name, p in module.named_parameters() if ".experts." not in name)
            other = max(other, values)
    return ModelSize(total, total - idle, trainable, all_experts, (largest, other))


def total_steps(recipe: Recipe, data: Data) -> int:
    """Optimizer steps of the run. The last step of an `epochs` run may have fewer rows, all others are full."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    rows = data.train.total_rows()
    assert rows is not None  # the stream has the recipe's epochs
    return math.ceil(rows / recipe.train.batch)


def estimate_memory(
    recipe: Recipe, config: MiMoV2FlashConfig, size: ModelSize, sizes: ParallelSizes | None = None
) -> MemoryEstimate:
    """What training takes on one device: fp32 weights (and rounded copies in bf16), fp32 gradients, AdamW's two fp32
    moments, and the activations of one micro-batch with the loss head's working set; with `sizes` of several ranks the
    share of one, and what is gathered on it."""
    narrow = recipe.model.dtype == "bfloat16"
    activations = activation_bytes(recipe, config, sizes)
    if sizes is None:
        return MemoryEstimate(size.total * (6 if narrow else 4), size.trainable * 4, size.trainable * 8, activations)
    dense = (size.total - size.experts) / sizes.dense_shards
    mine = dense + size.experts / sizes.expert_shards
    trained = mine * size.trainable / size.total
    return MemoryEstimate(
        round(4 * mine), round(4 * trained), round(8 * trained), activations, _gathered(recipe, config, size, sizes)
    )


def _gathered(recipe: Recipe, config: MiMoV2FlashConfig, size: ModelSize, sizes: ParallelSizes) -> int:
    """Parameters of the blocks in use, or of all where they are kept, and gradients on their way."""
    width, parallel = (2 if recipe.model.dtype == "bfloat16" else 4), recipe.parallel
    rows = -(-recipe.train.batch // sizes.data)
    dense = size.total - size.experts
    accumulates = defers_sync(recipe, dense, size.experts, sizes) and rows > recipe.train.micro_batch
    ends = 2 * config.vocab_size * config.hidden_size
    everything = dense + size.experts // sizes.expert
    experts, other = size.largest_layer
    block = experts // sizes.expert + other
    frees = parallel.reshard and not accumulates
    parameters = block * (2 + parallel.prefetch) + ends if frees else everything
    gradients = everything * size.trainable // size.total if accumulates else 2 * block
    return parameters * width + gradients * 4


def activation_bytes(recipe: Recipe, config: MiMoV2FlashConfig, sizes: ParallelSizes | None = None) -> int:
    """What the backward pass of one micro-batch of full rows needs on one rank, with the loss head's working set."""
    bytes_per_value = 2 if recipe.model.dtype == "bfloat16" else 4
    ranks = 1 if sizes is None else sizes.context
    tokens_T = -(-recipe.train.micro_batch * recipe.data.sequence_length // ranks)
    layers = [
        _layer_values(config, kind == "sliding_attention", bool(moe))
        for kind, moe in zip(config.layer_types, config.moe_layer_freq, strict=True)
    ]
    hidden = config.hidden_size
    kept = sum(layers) if recipe.train.activation_checkpointing == "none" else hidden * len(layers) + max(layers)
    chunk = min(recipe.train.loss_chunk, tokens_T)
    # Logits and their softmax for one chunk, and the fp32 gradient of the head before it joins the others.
    head = 2 * 4 * chunk * config.vocab_size + 4 * config.vocab_size * hidden
    return tokens_T * kept * bytes_per_value + head


def _layer_values(config: MiMoV2FlashConfig, sliding: bool, moe: bool) -> int:
    """Values per token that the backward pass of one layer needs."""
    heads, kv, qk_width, v_width = (
        (
            config.swa_num_attention_heads,
            config.swa_num_key_value_heads,
            config.swa_head_dim,
            config.swa_v_head_dim,
        )
        if sliding
        else (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.v_head_dim)
    )
    hidden_D = config.hidden_size
    # Input, normalised input and output of both halves; q and k before and after the rotation; v twice; the result.
    attention = 3 * hidden_D + 2 * (heads + kv) * qk_width + 2 * kv * v_width + heads * v_width
    if not moe:
        return attention + 3 * hidden_D + 4 * config.intermediate_size
    # Per chosen expert: gathered input and output, gate and up, their activation and product.
    return attention + 3 * hidden_D + config.num_experts_per_tok * (2 * hidden_D + 4 * config.moe_intermediate_size)


def describe(
    recipe: Recipe,
    config: MiMoV2FlashConfig,
    size: ModelSize,
    data: Data,
    steps: int,
    sizes: ParallelSizes | None = None,
) -> list[str]:
    """The first lines of a run; `sizes` of one in several processes."""
    plan, train = data.train.plan(0), recipe.train
    rows = len(plan.rows)
    per_row = plan.tokens / rows
    lines = [
        describe_model(recipe, config, size),
        _describe_data("train", data),
    ]
    if data.validation is not None:
        lines.append(_describe_data("held out", data))
    lines += [
        f"rows     {rows:,} per epoch of {data.train.sequence_length:,} tokens, {100 * plan.efficiency:.1f} % full"
        + _left_out(data),
        f"steps    {steps:,} of {plural(train.batch, 'row')} (about {train.batch * per_row:,.0f} tokens, "
        f"{_describe_micro_batches(recipe, sizes)}); "
        f"{rows / train.batch:,.1f} steps per epoch, {steps * train.batch / rows:.2f} epochs",
    ]
    if sizes is not None:
        lines.append(describe_sizes(sizes))
    memory = estimate_memory(recipe, config, size, sizes)
    return [*lines, describe_memory(memory, sizes is not None) + _free_here()]


def describe_model(recipe: Recipe, config: MiMoV2FlashConfig, size: ModelSize) -> str:
    """What is trained, in one line."""
    kinds = config.layer_types
    return (
        f"model    {recipe.model.path or 'preset ' + str(recipe.model.preset)}: {len(kinds)} layers "
        f"({kinds.count('full_attention')} full, {kinds.count('sliding_attention')} sliding with a window of "
        f"{config.sliding_window}), {short_number(size.total)} parameters, {short_number(size.active)} active per "
        f"token, {short_number(size.trainable)} trained"
    )


def describe_sizes(sizes: ParallelSizes) -> str:
    """Who does what, in one line."""
    number = "1 copy" if sizes.replicate == 1 else f"{sizes.replicate:,} copies"
    copies = f"{number} of the model in {plural(sizes.dense_shards, 'shard')}"
    experts = (
        f"experts over {plural(sizes.expert, 'rank')}, each part in {plural(sizes.expert_shard, 'shard')}"
        if sizes.expert > 1
        else "experts in the same shards"
    )
    context = f"; {plural(sizes.context, 'rank')} share the tokens of a row" if sizes.context > 1 else ""
    return f"ranks    {sizes.world:,}: {copies}; {experts}{context}"


def _describe_micro_batches(recipe: Recipe, sizes: ParallelSizes | None) -> str:
    train = recipe.train
    ranks = 1 if sizes is None else sizes.data
    number = math.ceil(math.ceil(train.batch / ranks) / train.micro_batch)
    of = f"{plural(number, 'micro-batch', 'es')} of {plural(train.micro_batch, 'row')}"
    each = "ranks" if sizes is None or sizes.context == 1 else f"groups of {sizes.context:,} ranks"
    return of if ranks == 1 else f"{of} on each of {ranks:,} {each}"


def plural(number: int, word: str, ending: str = "s") -> str:
    """`1 row`, `2 rows`."""
    return f"{number:,} {word}{'' if number == 1 else ending}"


def _describe_data(name: str, data: Data) -> str:
    report = data.train_report if name == "train" else data.validation_report
    assert report is not None
    masked = f", {report.fully_masked:,} without a target left out" if report.fully_masked else ""
    return (
        f"{name:<8} {report.examples:,} examples, {short_number(report.tokens)} tokens, "
        f"{short_number(report.supervised_tokens)} of them targets{masked}"
    )


def _left_out(data: Data) -> str:
    plan = data.train.plan(0)
    parts = []
    if plan.dropped:
        parts.append(f"{plan.dropped:,} examples ({plan.dropped_tokens:,} tokens) dropped as too long")
    if plan.split_count:
        parts.append(f"{plan.split_count:,} examples cut into pieces")
    if plan.idle_pieces:
        parts.append(f"{plan.idle_pieces:,} pieces ({plan.idle_tokens:,} tokens) without a target left out")
    return "".join(f"; {part}" for part in parts)


def describe_memory(memory: MemoryEstimate, per_rank: bool = True) -> str:
    """What one device has to hold, in one line."""
    gathered = f", gathered {memory.gathered / GIB:.2f}" if per_rank else ""
    return (
        f"memory   about {memory.total / GIB:.2f} GiB{' per rank' if per_rank else ''}: weights "
        f"{memory.weights / GIB:.2f}, gradients {memory.gradients / GIB:.2f}, AdamW {memory.optimizer / GIB:.2f}, "
        f"activations {memory.activations / GIB:.2f}" + gathered
    )


def _free_here() -> str:
    machine = memory_bytes()
    return f"; {machine.available / GIB:.1f} GiB free here" if machine is not None else ""


def short_number(number: int) -> str:
    """`309 B`, `15.3 B`, `44.1 M`, `512`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return str(number)
