"""The recipe: what a training run does, as frozen pydantic models. Imports no torch.

Every key has its type, its default and its one-line meaning here and nowhere else; `docs/recipes.md` is checked against
this file. Reading a file, overrides and the wording of errors are in `recipe_file.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from automimo.data.sources import SourceKind, SourceSpec
from automimo.errors import ConfigError


def _as_tuple(value: Any) -> Any:
    """YAML has lists, a frozen recipe holds tuples; anything else is left for pydantic to refuse."""
    return tuple(value) if isinstance(value, list) else value


def _named(value: Any) -> Any:
    """Activation checkpointing was on or off before there were kinds of it, and most people still say so."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


Text = Annotated[str, Field(min_length=1)]
Patterns = Annotated[tuple[Text, ...], BeforeValidator(_as_tuple)]


class Section(BaseModel):
    """Base of all parts of a recipe: immutable, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSection(Section):
    path: Text | None = Field(default=None, description="Hugging Face folder or Hub id to start from; this or `preset`")
    preset: Text | None = Field(
        default=None, description="name of a preset: a new model with random weights; this or `path`"
    )
    attention: Literal["sdpa", "eager", "flex", "te"] = Field(default="sdpa", description="attention backend")
    window: int | None = Field(
        default=None,
        ge=1,
        description="keys a query of a sliding layer sees, itself included; null keeps the model's own",
    )
    source_layout: Literal["split", "fused", "contiguous"] | None = Field(
        default=None, description="attention layout of a `path` that does not tell it; null: as its files say"
    )
    source_tp: int | None = Field(
        default=None, ge=1, description="shards of the fused attention of a `path` that does not tell it"
    )
    flash_v_scales: Literal["strip", "own"] = Field(
        default="strip", description="scales of v in V2-Flash FP8 files: the strip it shares with k, or its own"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of the forward and backward pass; master weights and optimizer are always float32",
    )
    train: Patterns = Field(default=("*",), description="patterns of the parameters to train (shell wildcards)")
    freeze: Patterns = Field(default=(), description="patterns of parameters to leave as they are; wins over `train`")
    train_sinks: bool = Field(default=False, description="also train the attention sinks")


class MoESection(Section):
    router: Literal["train", "freeze"] = Field(
        default="train", description="train the router weights, or leave them alone"
    )
    bias_update_speed: float = Field(
        default=0.0, ge=0, description="step of the load-balancing update of the routers' selection bias; 0 = never"
    )
    aux_loss: float = Field(default=0.0, ge=0, description="coefficient of the load-balancing loss; 0 = none")


class SourceSection(Section):
    kind: SourceKind = Field(
        description="`chat` or `text` (JSONL), `hf` (Hugging Face data set), `python_docs` (Python's own documentation)"
    )
    path: Text | None = Field(
        default=None, description="JSONL file; for `hf` a file, a folder or a Hub id; none for `python_docs`"
    )
    weight: float = Field(
        default=1.0, gt=0, lt=1e6, description="how often an epoch shows each example (2 = twice, 0.5 = half)"
    )
    split: Text | None = Field(
        default=None,
        description="split of an `hf` or `python_docs` source; null = `train` or `validation`, by its place",
    )
    subset: Text | None = Field(default=None, description="configuration name of a Hub data set")
    revision: Text | None = Field(default=None, description="commit, branch or tag of a Hub data set")

    def spec(self) -> SourceSpec:
        """The source as `automimo.data` takes it. Raises ConfigError for keys that do not go together."""
        return SourceSpec(**self.model_dump())


class DataSection(Section):
    train: Annotated[tuple[SourceSection, ...], BeforeValidator(_as_tuple)] = Field(description="training sources")
    validation: Annotated[tuple[SourceSection, ...], BeforeValidator(_as_tuple)] = Field(
        default=(), description="held-out sources"
    )
    sequence_length: int = Field(default=4096, ge=2, description="tokens of one packed row")
    packing: bool = Field(default=True, description="pack several documents in a row (attention never crosses them)")
    overflow: Literal["error", "drop", "split"] = Field(
        default="error", description="what to do with an example longer than a row"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the shuffle and the packing")


class OptimGroup(Section):
    pattern: Text = Field(description="shell wildcards on our parameter names; must match something")
    lr: float | None = Field(
        default=None, gt=0, description="peak learning rate of these parameters; null = `optim.lr`"
    )
    weight_decay: float | None = Field(default=None, ge=0, description="their weight decay; null = the usual one")


class OptimSection(Section):
    name: Literal["adamw"] = Field(default="adamw", description="optimizer")
    lr: float = Field(default=1e-5, gt=0, description="peak learning rate")
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], BeforeValidator(_as_tuple)
    ] = Field(default=(0.9, 0.95), description="decay of the running mean and mean square of the gradient")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the mean square")
    weight_decay: float = Field(
        default=0.1, ge=0, description="decoupled weight decay; never on norms, sinks and biases"
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine", description="learning rate after the warm-up"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up")
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="where linear, cosine and wsd end, as a share of `lr`"
    )
    decay_share: float = Field(
        default=0.2, gt=0, le=1, description="share of all steps that wsd decays over, at the end"
    )
    clip_norm: float | None = Field(default=1.0, gt=0, description="largest global gradient norm; null = never clip")
    groups: Annotated[tuple[OptimGroup, ...], BeforeValidator(_as_tuple)] = Field(
        default=(), description="other settings for some parameters; the first pattern that matches wins"
    )


class ParallelSection(Section):
    """How the processes share the work. Changes nothing of what is computed, except in the last bits."""

    data: int | None = Field(
        default=None, ge=1, description="ranks that see different rows; null: all that are left over"
    )
    replicate: int = Field(
        default=1,
        ge=1,
        description="copies of the sharded model among the data ranks (HSDP); 1 = every rank has a shard",
    )
    expert: int = Field(default=1, ge=1, description="ranks that share the experts of a layer; tokens travel to them")
    context: int = Field(
        default=1,
        ge=1,
        description="ranks that share the tokens of a row, for documents that are too long for one; the heads of a "
        "layer are exchanged among them",
    )
    dispatcher: Literal["torch", "deepep"] = Field(
        default="torch", description="how tokens travel: all-to-all of torch.distributed, or DeepEP (GPUs)"
    )
    reshard: bool = Field(
        default=True, description="free gathered parameters after a block's forward pass; false: faster, more memory"
    )
    prefetch: int = Field(default=1, ge=0, description="blocks whose parameters are gathered ahead of time")
    defer_sync: bool | None = Field(
        default=None,
        description="gather parameters and exchange gradients once per step instead of once per micro-batch, which "
        "takes an unsharded copy of both; null: where that is at most 16 GiB per rank",
    )
    offload: bool = Field(
        default=False, description="keep parameters, gradients and optimizer state on the CPU of a GPU machine"
    )
    timeout: float = Field(
        default=1800.0, gt=0, description="seconds without progress after which a run dumps its stacks and ends"
    )


class TrainSection(Section):
    steps: int | None = Field(default=None, ge=1, description="optimizer steps; this or `epochs`")
    epochs: int | None = Field(default=None, ge=1, description="passes over the training data; this or `steps`")
    batch: int = Field(default=8, ge=1, description="packed rows per optimizer step")
    micro_batch: int = Field(default=1, ge=1, description="rows per forward pass; divides `batch`")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="seed of new weights and of everything random but the data order"
    )
    evaluate_every: int = Field(
        default=0, ge=0, description="steps between evaluations, the first before step 1; 0 = only at the end"
    )
    save_every: int = Field(default=500, ge=0, description="steps between checkpoints; 0 = only at the end")
    keep: int = Field(default=2, ge=1, description="newest checkpoints to keep")
    activation_checkpointing: Annotated[Literal["none", "full", "selective"], BeforeValidator(_named)] = Field(
        default="none",
        description="recompute activations in backward, which takes less memory and more time: `full` (or true) "
        "recomputes everything, `selective` keeps every second matrix product, `none` is false",
    )
    compile: bool = Field(default=False, description="compile norms and dense MLPs with torch.compile")
    async_save: bool = Field(
        default=False,
        description="write checkpoints in the background from a copy in CPU memory, while training goes on",
    )
    loss_chunk: int = Field(default=1024, ge=1, description="tokens per piece of the vocabulary projection")
    resume: Text = Field(
        default="auto",
        description="`auto`: newest checkpoint of `output`; `never`; or a checkpoint or run to start from",
    )
    final: Literal["bf16", "fp32", "source", "none"] = Field(
        default="bf16",
        description="how `final/` is stored: in this dtype, in the layout and quantisation of the model it started "
        "from (`source`), or not at all",
    )


class Recipe(Section):
    """A whole training run. `load_recipe` makes one from a file; `dump_recipe` writes one that reads back equal."""

    output: Text = Field(description="run folder")
    model: ModelSection
    moe: MoESection = MoESection()
    data: DataSection
    optim: OptimSection = OptimSection()
    parallel: ParallelSection = ParallelSection()
    train: TrainSection

    @property
    def folder(self) -> Path:
        return Path(self.output).expanduser()


class Problem(NamedTuple):
    """What is wrong with a key and what to do; `involves` are the keys whose own faults would explain it away."""

    key: str
    text: str
    involves: tuple[str, ...] = ()


def cross_check(sections: dict[str, Any]) -> Iterator[Problem]:
    """Rules between keys. A section that cannot be made at all is missing from `sections` and is skipped."""
    model, moe, data = sections.get("model"), sections.get("moe"), sections.get("data")
    optim, train = sections.get("optim"), sections.get("train")
    if isinstance(model, ModelSection):
        yield from _check_model(model)
    if isinstance(moe, MoESection) and moe.router == "freeze":
        for key, value in (("moe.bias_update_speed", moe.bias_update_speed), ("moe.aux_loss", moe.aux_loss)):
            if value > 0:
                yield Problem(key, "must be 0 when moe.router is freeze: it would train the router", ("moe.router",))
    if isinstance(data, DataSection):
        yield from _check_sources(data)
    if isinstance(train, TrainSection):
        if (train.steps is None) == (train.epochs is None):
            text = "give exactly one of train.steps and train.epochs"
            yield Problem("train", text, ("train.steps", "train.epochs"))
        if train.batch % train.micro_batch:
            text = f"{train.batch} is not a multiple of train.micro_batch {train.micro_batch}"
            yield Problem("train.batch", text, ("train.micro_batch",))
        if isinstance(data, DataSection) and train.evaluate_every and not data.validation:
            text = f"is {train.evaluate_every}, but data.validation names nothing to evaluate on"
            yield Problem("train.evaluate_every", text, ("data.validation",))
        if isinstance(optim, OptimSection) and train.steps is not None:
            schedule = schedule_problem(optim, train.steps)
            if schedule:
                yield Problem("optim.warmup_steps", schedule, ("train.steps",))


def _check_model(model: ModelSection) -> Iterator[Problem]:
    if (model.path is None) == (model.preset is None):
        text = "give exactly one of model.path (start from a checkpoint) and model.preset (start from nothing)"
        yield Problem("model", text, ("model.path", "model.preset"))
    if model.attention == "te":
        if model.train_sinks:
            text = "must be false with model.attention te, which can only use sinks, not train them: choose sdpa"
            yield Problem("model.train_sinks", text, ("model.attention",))
        if model.dtype == "float32":
            text = "must be bfloat16 with model.attention te, whose packed kernels know no float32"
            yield Problem("model.dtype", text, ("model.attention",))


def _check_sources(data: DataSection) -> Iterator[Problem]:
    if not data.train:
        yield Problem("data.train", "names no source to train on")
    for part, sources in (("train", data.train), ("validation", data.validation)):
        for i, source in enumerate(sources):
            try:
                source.spec()
            except ConfigError as error:
                yield Problem(f"data.{part}.{i}", str(error), (f"data.{part}",))


def schedule_problem(optim: OptimSection, steps: int) -> str | None:
    """Why the schedule does not fit into `steps`, or None. Also called once `train.epochs` has become steps."""
    if optim.warmup_steps >= steps:
        return f"{optim.warmup_steps} leaves nothing of the {steps} steps of the run: lower it"
    return None


def check_schedule(optim: OptimSection, steps: int) -> None:
    """Raise ConfigError if the warm-up does not fit into `steps`."""
    problem = schedule_problem(optim, steps)
    if problem:
        raise ConfigError(f"optim.warmup_steps: {problem}")


# Keys that a resumed run may change: they decide where things are written, how often, and how the same numbers are
# computed, never what is learned from which token. train.steps and train.epochs are judged by the number of steps.
FREE_ON_RESUME = frozenset(
    {
        "output",
        "model.attention",
        # How the files of the start are read, which a resumed run does not.
        "model.flash_v_scales",
        "model.source_layout",
        "model.source_tp",
        "parallel.context",
        "parallel.data",
        "parallel.defer_sync",
        "parallel.dispatcher",
        "parallel.expert",
        "parallel.offload",
        "parallel.prefetch",
        "parallel.replicate",
        "parallel.reshard",
        "parallel.timeout",
        "train.activation_checkpointing",
        "train.async_save",
        "train.compile",
        "train.epochs",
        "train.evaluate_every",
        "train.final",
        "train.keep",
        "train.loss_chunk",
        "train.micro_batch",
        "train.resume",
        "train.save_every",
        "train.steps",
    }
)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts and lists -> {dotted key: leaf}. Empty lists and dicts are leaves."""
    items: Iterator[tuple[str, Any]]
    if isinstance(value, dict) and value:
        items = ((str(k), v) for k, v in value.items())
    elif isinstance(value, list | tuple) and value:
        items = ((str(i), v) for i, v in enumerate(value))
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat.update(flatten(item, f"{prefix}.{key}" if prefix else key))
    return flat


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`key: old -> new` for every key that a resumed run may not change. Both as `recipe.model_dump(mode="json")`."""
    before, after = flatten(old), flatten(new)
    changed = []
    for key in [*before, *(k for k in after if k not in before)]:
        left, right = before.get(key), after.get(key)  # an absent list item has only nulls
        if left != right and key not in FREE_ON_RESUME:
            changed.append(f"{key}: {_plain(left)} -> {_plain(right)}")
    return changed


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
