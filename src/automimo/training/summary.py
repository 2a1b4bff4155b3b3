"""The numbers that follow from a recipe, printed before anything is trained.

Legend: T tokens of a micro-batch, D hidden width.
"""

import math
from dataclasses import dataclass

from torch import nn

from automimo.machine import GIB, memory_bytes
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.moe import moe_layers
from automimo.training.recipe import Recipe
from automimo.training.setup import Data


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters (values). `active`: used by one token, of each layer's experts the chosen ones."""

    total: int
    active: int
    trainable: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device. Activations are counted from the shapes that a forward pass keeps.

    Gradients and activations together against the peaks of benchmarks/train_step.py (fp32, 1k to 16k tokens, five
    models): 9 % too low to 19 % too high.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def model_size(model: nn.Module, trainable: int) -> ModelSize:
    """Count the parameters of a model (the meta device will do)."""
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = 0
    for layer in moe_layers(model).values():
        experts = sum(parameter.numel() for parameter in layer.experts.parameters())
        idle += experts - experts * layer.config.n_activated_experts // layer.config.n_routed_experts
    return ModelSize(total, total - idle, trainable)


def total_steps(recipe: Recipe, data: Data) -> int:
    """Optimizer steps of the run. The last step of an `epochs` run may have fewer rows, all others are full."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    rows = data.train.total_rows()
    assert rows is not None  # the stream has the recipe's epochs
    return math.ceil(rows / recipe.train.batch)


def estimate_memory(recipe: Recipe, config: MiMoV2FlashConfig, size: ModelSize) -> MemoryEstimate:
    """What training takes: fp32 weights (and rounded copies in bf16), fp32 gradients, AdamW's two fp32 moments, and the
    activations of one micro-batch with the loss head's working set."""
    narrow = recipe.model.dtype == "bfloat16"
    return MemoryEstimate(
        weights=size.total * (6 if narrow else 4),
        gradients=size.trainable * 4,
        optimizer=size.trainable * 8,
        activations=_activations(recipe, config, 2 if narrow else 4),
    )


def _activations(recipe: Recipe, config: MiMoV2FlashConfig, bytes_per_value: int) -> int:
    tokens_T = recipe.train.micro_batch * recipe.data.sequence_length
    layers = [
        _layer_values(config, kind == "sliding_attention", bool(moe))
        for kind, moe in zip(config.layer_types, config.moe_layer_freq, strict=True)
    ]
    hidden = config.hidden_size
    kept = sum(layers) if not recipe.train.activation_checkpointing else hidden * len(layers) + max(layers)
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


def describe(recipe: Recipe, config: MiMoV2FlashConfig, size: ModelSize, data: Data, steps: int) -> list[str]:
    """The first lines of a run."""
    plan, train = data.train.plan(0), recipe.train
    rows = len(plan.rows)
    per_row = plan.tokens / rows
    kinds = config.layer_types
    lines = [
        f"model    {recipe.model.path or 'preset ' + str(recipe.model.preset)}: {len(kinds)} layers "
        f"({kinds.count('full_attention')} full, {kinds.count('sliding_attention')} sliding with a window of "
        f"{config.sliding_window}), {_count(size.total)} parameters, {_count(size.active)} active per token, "
        f"{_count(size.trainable)} trained",
        _describe_data("train", data),
    ]
    if data.validation is not None:
        lines.append(_describe_data("held out", data))
    lines += [
        f"rows     {rows:,} per epoch of {data.train.sequence_length:,} tokens, {100 * plan.efficiency:.1f} % full"
        + _left_out(data),
        f"steps    {steps:,} of {_plural(train.batch, 'row')} (about {train.batch * per_row:,.0f} tokens, "
        f"{_plural(train.batch // train.micro_batch, 'micro-batch', 'es')} of {_plural(train.micro_batch, 'row')}); "
        f"{rows / train.batch:,.1f} steps per epoch, {steps * train.batch / rows:.2f} epochs",
        _describe_memory(estimate_memory(recipe, config, size)),
    ]
    return lines


def _plural(number: int, word: str, ending: str = "s") -> str:
    return f"{number:,} {word}{'' if number == 1 else ending}"


def _describe_data(name: str, data: Data) -> str:
    report = data.train_report if name == "train" else data.validation_report
    assert report is not None
    masked = f", {report.fully_masked:,} without a target left out" if report.fully_masked else ""
    return (
        f"{name:<8} {report.examples:,} examples, {_count(report.tokens)} tokens, "
        f"{_count(report.supervised_tokens)} of them targets{masked}"
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


def _describe_memory(memory: MemoryEstimate) -> str:
    machine = memory_bytes()
    free = f"; {machine.available / GIB:.1f} GiB free here" if machine is not None else ""
    return (
        f"memory   about {memory.total / GIB:.2f} GiB: weights {memory.weights / GIB:.2f}, gradients "
        f"{memory.gradients / GIB:.2f}, AdamW {memory.optimizer / GIB:.2f}, activations {memory.activations / GIB:.2f}"
        + free
    )


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return str(number)
