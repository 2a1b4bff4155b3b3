"""From a recipe to the objects of a run: model folder, tokenizer, data, model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast

from automimo.backend import BackendConfig
from automimo.checkpoint import CheckpointReader, publish_folder, write_text_atomic
from automimo.data import DataStream, LoadReport, load_examples
from automimo.distributed.mesh import Meshes, ParallelSizes, infer_sizes
from automimo.errors import ConfigError
from automimo.init_model import TRAINED_TOKENIZER, init_model
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, model_class_of
from automimo.mimo_v2_flash.source import config_values, resolve_folder
from automimo.mimo_v2_flash.storage import SourceOptions, StoredCheckpoint
from automimo.mimo_v2_flash.tokenizer import load_tokenizer
from automimo.mimo_v2_flash.weights import check_weights
from automimo.mimo_v2_flash.weights import load_weights as load_weights_into
from automimo.moe import moe_layers
from automimo.parallelize import ParallelConfig, parallelize
from automimo.training.recipe import DataSection, Recipe
from automimo.training.run_folder import RunFolder

# Hidden, so that an export does not carry it on as a side file of the model.
INIT_MARK = ".init.json"
# Of 80 GiB and more that the GPUs have which such models are trained on.
DEFERRED_BYTES = 16 * 2**30


@dataclass(frozen=True)
class Data:
    """Streams of rows and what was read; `validation` is None without held-out sources."""

    train: DataStream
    train_report: LoadReport
    validation: DataStream | None
    validation_report: LoadReport | None


@contextmanager
def model_folder(recipe: Recipe, folder: RunFolder, *, write: bool) -> Iterator[Path]:
    """The Hugging Face folder a run starts from: that of `model.path`, or `OUTPUT/init` of a preset, made when it is
    absent or of another preset or seed. Without `write` a new one lives in a temporary folder while this is open.
    """
    if recipe.model.path is not None:
        yield resolve_folder(recipe.model.path)
        return
    preset = recipe.model.preset
    assert preset is not None  # the recipe has one of the two
    if preset not in TRAINED_TOKENIZER:
        raise ConfigError(
            f"model.preset: {preset} brings no tokenizer. Make its folder with `automimo init OUT --preset {preset} "
            "--tokenizer FOLDER` and give it as model.path"
        )
    mark = json.dumps({"preset": preset, "seed": recipe.train.seed, "dtype": "float32"}) + "\n"
    found = folder.init / INIT_MARK
    if found.is_file() and found.read_text(encoding="utf-8") == mark:
        yield folder.init
    elif write:
        _make_init(folder.init, preset, recipe.train.seed, mark)
        yield folder.init
    else:
        with TemporaryDirectory() as temporary:
            init_model(temporary, preset, seed=recipe.train.seed, dtype=torch.float32)
            yield Path(temporary)


def _make_init(folder: Path, preset: str, seed: int, mark: str) -> None:
    def make(temporary: Path) -> None:
        init_model(temporary, preset, seed=seed, dtype=torch.float32)
        write_text_atomic(temporary / INIT_MARK, mark)

    publish_folder(folder, make, replace=True)


def load_data(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Data:
    """Read, render and plan all sources of the recipe. Raises DataError."""
    settings = recipe.data
    examples, report = load_examples([source.spec() for source in settings.train], tokenizer, part="train")
    train = _stream(settings, examples, settings.seed, recipe.train.epochs)
    if not settings.validation:
        return Data(train, report, None, None)
    specs = [source.spec() for source in settings.validation]
    examples, validation_report = load_examples(specs, tokenizer, part="validation")
    return Data(train, report, _stream(settings, examples, 0, 1), validation_report)


def _stream(settings: DataSection, examples: list, seed: int, epochs: int | None) -> DataStream:
    return DataStream(
        examples,
        sequence_length=settings.sequence_length,
        packing=settings.packing,
        overflow=settings.overflow,
        seed=seed,
        epochs=epochs,
    )


def load_fitting_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder. Raises ConfigError when it has ids that the model has no embedding for."""
    tokenizer = load_tokenizer(folder)
    size = config_values(folder).get("vocab_size", len(tokenizer))
    if len(tokenizer) > size:
        raise ConfigError(f"{folder}: the tokenizer has {len(tokenizer):,} tokens, the model's vocab_size is {size:,}")
    return tokenizer


def build_model(recipe: Recipe, folder: Path, *, load_weights: bool, device: torch.device) -> MiMoV2FlashForCausalLM:
    """The whole model of `folder` in fp32 on `device`, with the recipe's window, attention and router settings.

    Without `load_weights` (resume, or the meta device) its values are arbitrary. Raises ConfigError, CheckpointError.
    """
    moe = recipe.moe
    with device:
        model = model_class_of(folder).from_pretrained(
            str(folder),
            dtype=torch.float32,
            load_weights=load_weights,
            backend=BackendConfig(
                attn=recipe.model.attention,
                dispatcher=recipe.parallel.dispatcher,
            ),
            source_options=source_options(recipe),
            sliding_window=recipe.model.window,
            moe_overrides={
                "train_gate": moe.router == "train",
                "gate_bias_update_factor": moe.bias_update_speed,
                "aux_loss_coeff": moe.aux_loss,
            },
        )
    if (moe.bias_update_speed or moe.aux_loss) and not moe_layers(model):
        raise ConfigError("moe.bias_update_speed and moe.aux_loss must be 0: the model has no experts")
    model.model.set_activation_checkpointing(recipe.train.activation_checkpointing)
    return model.train()


def build_shard(
    recipe: Recipe, folder: Path, meshes: Meshes, *, load_weights: bool, device: torch.device
) -> MiMoV2FlashForCausalLM:
    """This rank's part of the model of `folder`, in fp32: laid out without memory first, then filled with nothing but
    what the rank keeps. All ranks call it. Raises ConfigError, CheckpointError."""
    model = lay_out(recipe, folder, meshes)
    if recipe.parallel.offload:
        model.to_empty(device="cpu")
        _keep_whole_tensors_on(model, device)
    else:
        model.to_empty(device=device)
    model.source_folder = folder
    if load_weights:
        with CheckpointReader(folder) as reader:
            load_weights_into(model, StoredCheckpoint(reader, model.config, source_options(recipe)))
    return model


def _keep_whole_tensors_on(model: MiMoV2FlashForCausalLM, device: torch.device) -> None:
    """Offloaded shards visit the device when FSDP gathers them; the buffers and sinks it does not have live there."""
    for tensor in (*model.buffers(), *model.parameters()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)


def lay_out(recipe: Recipe, folder: Path, meshes: Meshes) -> MiMoV2FlashForCausalLM:
    """This rank's part of the model of `folder` on the meta device. Raises ConfigError, CheckpointError."""
    model = build_model(recipe, folder, load_weights=False, device=torch.device("meta"))
    experts = sum(p.numel() for layer in moe_layers(model).values() for p in layer.experts.parameters())
    dense = sum(p.numel() for p in model.parameters()) - experts
    model.backend.enable_fsdp_optimizations = defers_sync(recipe, dense, experts, meshes.sizes)
    parallelize(model, meshes, parallel_config(recipe))
    return model


def defers_sync(recipe: Recipe, dense: int, experts: int, sizes: ParallelSizes) -> bool:
    """Whether gradients are exchanged once per step; `dense` and `experts` are numbers of parameters.

    By itself only while parameters in the compute dtype and gradients in fp32, both whole but for the experts of other
    ranks, take at most DEFERRED_BYTES.
    """
    if recipe.parallel.defer_sync is not None:
        return recipe.parallel.defer_sync
    width = 2 if recipe.model.dtype == "bfloat16" else 4
    return (dense + experts // sizes.expert) * (width + 4) <= DEFERRED_BYTES


def parallel_config(recipe: Recipe) -> ParallelConfig:
    """What the recipe says about a rank's part of the model."""
    parallel = recipe.parallel
    return ParallelConfig(
        dtype=getattr(torch, recipe.model.dtype),
        reshard=parallel.reshard,
        prefetch=parallel.prefetch,
        offload=parallel.offload,
        activation_checkpointing=recipe.train.activation_checkpointing,
        compile=recipe.train.compile,
    )


def parallel_sizes(recipe: Recipe, world: int, n_experts: int | None) -> ParallelSizes:
    """Ranks along each dimension. Raises ConfigError with the numbers."""
    parallel = recipe.parallel
    return infer_sizes(
        world, data=parallel.data, replicate=parallel.replicate, expert=parallel.expert, context=parallel.context,
        n_experts=n_experts,
    )  # fmt: skip


def shares_work(recipe: Recipe) -> bool:
    """Whether the recipe asks for several processes."""
    parallel = recipe.parallel
    return max(parallel.data or 1, parallel.replicate, parallel.expert, parallel.context) > 1


def source_options(recipe: Recipe) -> SourceOptions:
    """What the recipe says about the files of `model.path` that they do not say themselves."""
    model = recipe.model
    return SourceOptions(model.source_layout, model.source_tp, model.flash_v_scales)


def check_source(recipe: Recipe, folder: Path, model: MiMoV2FlashForCausalLM) -> None:
    """Raise CheckpointError unless the weights of `folder` fit `model`; reads headers only."""
    with CheckpointReader(folder) as reader:
        check_weights(model, StoredCheckpoint(reader, model.config, source_options(recipe)))
