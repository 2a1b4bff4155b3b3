"""`automimo train`: from a recipe to a finished run folder."""

from contextlib import ExitStack, closing
from itertools import zip_longest
from pathlib import Path

import torch
from rich.console import Console

from automimo.attention import check_heads
from automimo.checkpoint import write_text_atomic
from automimo.checkpoint.resume import tidy_steps
from automimo.distributed.mesh import Meshes, ParallelSizes, build_meshes
from automimo.distributed.watchdog import Watchdog
from automimo.distributed.world import World, exchange_texts, main_first, on_main, open_world, together
from automimo.errors import ConfigError, DataError
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.source import config_values
from automimo.parallelize import compile_blocks
from automimo.report import write_report
from automimo.training.export import export_final
from automimo.training.loop import Loop, train_loop
from automimo.training.metrics import Metrics, MetricsFile, NoMetrics, inherit_metrics
from automimo.training.optimizer import make_optimizer, select_trainable
from automimo.training.place import Place
from automimo.training.precision import MasterWeights
from automimo.training.progress import step_display
from automimo.training.recipe import Recipe, check_schedule
from automimo.training.recipe_file import dump_recipe
from automimo.training.run_folder import RunFolder, find_checkpoint
from automimo.training.setup import (
    Data,
    build_model,
    build_shard,
    check_source,
    load_data,
    load_fitting_tokenizer,
    model_folder,
    parallel_sizes,
    shares_work,
)
from automimo.training.state import (
    Saver,
    TrainingState,
    check_recipe,
    check_steps,
    read_values,
    restore,
    seed_everything,
)
from automimo.training.stop import stop_on_signals
from automimo.training.summary import ModelSize, describe, model_size, total_steps

# How many times parallel.timeout reading a model, or exporting it, may take: hours for the largest ones, in which
# nothing tells that they go on.
LONG_PHASE = 12


def run_training(
    recipe: Recipe, *, dry_run: bool = False, ranks: int | None = None, console: Console | None = None
) -> int:
    """Train as `recipe` says; returns the exit code: 0 when the run is complete, 143 or 130 when it saved and stopped
    on SIGTERM or SIGINT.

    Everything that happens follows from the recipe, its data and the files in its run folder, and each stage (new
    model, steps, evaluation, final export) appears complete or not at all. So the same call again after any kill
    continues, and ends with the weights of an undisturbed run. Started in several processes (torchrun, `--nproc`) it
    does the same work with all of them; their number may change from one call to the next. `dry_run` loads the data,
    builds the model without memory, prints what would happen (in `ranks` processes, where given) and writes nothing.

    Raises ConfigError, DataError, CheckpointError, TrainingError or, for the failure of another rank, DistributedError.
    """
    console = console or Console()
    folder = RunFolder(recipe.folder)
    if dry_run:
        _dry_run(recipe, folder, console, ranks)
        return 0
    timeout = recipe.parallel.timeout
    with open_world(collective_timeout(recipe)) as world, Watchdog(timeout if world.size > 1 else None) as watchdog:
        if not world.is_main:
            console = Console(quiet=True)
        with ExitStack() as stack:
            with together("opening the run folder"):
                if world.is_main:
                    stack.enter_context(folder.locked())
            return _train(recipe, folder, console, world, watchdog)


def collective_timeout(recipe: Recipe) -> float:
    """Seconds. Longer than the watchdog's patience: a collective that fails says less than the stacks of all ranks."""
    return recipe.parallel.timeout * LONG_PHASE + 60


def _dry_run(recipe: Recipe, folder: RunFolder, console: Console, ranks: int | None) -> None:
    with model_folder(recipe, folder, write=False) as source:
        data = load_data(recipe, load_fitting_tokenizer(source))
        total = total_steps(recipe, data)
        check_schedule(recipe.optim, total)
        model = build_model(recipe, source, load_weights=False, device=torch.device("meta"))
        check_source(recipe, source, model)
        trainable, _ = select_trainable(model, recipe.model, recipe.moe)
        make_optimizer(MasterWeights(model, torch.float32).trainable, recipe.optim)  # its patterns are checked
        size = model_size(model, trainable)
        sizes = _checked_layout(recipe, model, ranks)
        for line in describe(recipe, model.config, size, data, total, sizes):
            _say(console, line)
        if sizes is None and shares_work(recipe):
            _say(console, "layout   not checked: how many processes is not known; add --nproc N, or --world-size N")
    checkpoint = find_checkpoint(recipe)
    if checkpoint is not None:
        saved = read_values(checkpoint)
        check_recipe(saved, recipe, checkpoint)
        check_steps(saved, total, checkpoint)
    _say(
        console,
        f"dry run  would start from {checkpoint or 'the beginning'} and write to {folder.root}; nothing written",
    )


def _checked_layout(recipe: Recipe, model: MiMoV2FlashForCausalLM, ranks: int | None) -> ParallelSizes | None:
    """Sizes for `ranks` processes (None: one, or unknown). Raises ConfigError for what cannot be shared."""
    for block in model.model.blocks():
        check_heads(block.self_attn.num_heads, block.self_attn.num_kv_heads, recipe.parallel.context)
    if ranks is None or ranks == 1:
        return None
    return parallel_sizes(recipe, ranks, model.config.n_routed_experts)


def _train(recipe: Recipe, folder: RunFolder, console: Console, world: World, watchdog: Watchdog) -> int:
    watchdog.alive("reading the data and the model", patience=LONG_PHASE)
    _check_same_recipe(recipe)
    checkpoint = _agreed_checkpoint(recipe)
    saved = None
    with together("reading the checkpoint"):
        if checkpoint is not None:
            saved = read_values(checkpoint)
            check_recipe(saved, recipe, checkpoint)
    with ExitStack() as stack:
        source = main_first(
            "making the model folder", lambda: stack.enter_context(model_folder(recipe, folder, write=True))
        )
        meshes = _meshes(recipe, source, world)
        place = Place() if meshes is None else Place.of(world.rank, meshes.sizes)
        with together("reading the data"):
            data = load_data(recipe, load_fitting_tokenizer(source))
            total = total_steps(recipe, data)
            check_schedule(recipe.optim, total)
        seed_everything(recipe.train.seed)
        model = _model(recipe, source, meshes, world, load_weights=checkpoint is None)
        trainable, _ = select_trainable(model, recipe.model, recipe.moe)
        size = model_size(model, trainable)
        # Sharded parameters are fp32 masters themselves: FSDP rounds what it gathers.
        masters = MasterWeights(model, getattr(torch, recipe.model.dtype) if meshes is None else torch.float32)
        state = TrainingState(model, masters, make_optimizer(masters.trainable, recipe.optim), data.train)
        _check_same_data(data)
        if saved is not None and checkpoint is not None:
            check_steps(saved, total, checkpoint)
            restore(state, checkpoint)
        for line in describe(recipe, model.config, size, data, total, None if meshes is None else meshes.sizes):
            _say(console, line)
        if checkpoint is not None:
            _say(console, f"resume   from {checkpoint}")
        own = checkpoint is not None and checkpoint.parent == folder.checkpoints
        with together("preparing the run folder"):
            if world.is_main:
                _prepare(recipe, folder, None if own else checkpoint)
        with ExitStack() as open_files:
            stop = open_files.enter_context(stop_on_signals(world.size))
            with together("opening metrics.jsonl"):
                metrics = open_files.enter_context(closing(_metrics(folder, state.step, checkpoint, world)))
            display = open_files.enter_context(closing(step_display(console, state.step, total)))
            saver = Saver(state, recipe, folder.checkpoints)
            open_files.callback(saver.discard)  # after an error; otherwise nothing is pending then
            loop = Loop(
                recipe, place, total, data.validation, metrics, display, stop, watchdog, saver.save, saver.publish
            )
            train_loop(state, loop, saved=own)
            saver.finish()
        if stop:
            _say(console, f"stopped  at step {state.step}, saved; run the same command to go on")
            return stop.exit_code
        watchdog.alive("exporting the model", patience=LONG_PHASE)
        _finish(recipe, folder, source, console, state, size)
    return 0


def _agreed_checkpoint(recipe: Recipe) -> Path | None:
    """Rank 0 looks: two ranks that look at different moments could find different ones."""
    found = on_main("looking for a checkpoint", lambda: str(find_checkpoint(recipe) or ""))
    return Path(found) if found else None


def _meshes(recipe: Recipe, source: Path, world: World) -> Meshes | None:
    """None in a process that is alone: its model needs none of what makes many parts one."""
    n_experts = config_values(source).get("n_routed_experts")
    sizes = parallel_sizes(recipe, world.size, n_experts)
    return None if world.size == 1 else build_meshes(sizes, world.device.type, collective_timeout(recipe))


def _model(
    recipe: Recipe, source: Path, meshes: Meshes | None, world: World, *, load_weights: bool
) -> MiMoV2FlashForCausalLM:
    if meshes is None:
        model = build_model(recipe, source, load_weights=load_weights, device=world.device)
        if recipe.train.compile:
            compile_blocks(model)
        return model
    return build_shard(recipe, source, meshes, load_weights=load_weights, device=world.device)


def _check_same_recipe(recipe: Recipe) -> None:
    """Ranks with other recipes would take other turns and wait for each other for ever."""
    texts = exchange_texts(dump_recipe(recipe))
    others = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if others:
        line = next((a, b) for a, b in zip_longest(texts[0].splitlines(), texts[others[0]].splitlines()) if a != b)
        raise ConfigError(
            f"the recipe of rank {others[0]} is not that of rank 0 ({line[0]!r} there, {line[1]!r} here): start all "
            "processes with the same file and the same KEY=VALUE"
        )


def _check_same_data(data: Data) -> None:
    """Every rank takes its rows from streams of its own, so the streams have to be the same."""
    streams = [data.train, *([] if data.validation is None else [data.validation])]
    prints = exchange_texts(" ".join(stream.fingerprint() for stream in streams))
    others = [rank for rank, text in enumerate(prints) if text != prints[0]]
    if others:
        raise DataError(
            f"the training data of rank {others[0]} are not those of rank 0 ({len(others)} of {len(prints)} ranks "
            "differ): all machines must see the same files"
        )


def _prepare(recipe: Recipe, folder: RunFolder, foreign: Path | None) -> None:
    """What one rank writes before the first step; `foreign` is the checkpoint of another run that this starts from."""
    write_text_atomic(folder.recipe, dump_recipe(recipe))
    if foreign is not None:
        inherit_metrics(foreign, folder.metrics)
    tidy_steps(folder.checkpoints, keep=recipe.train.keep)


def _metrics(folder: RunFolder, step: int, checkpoint: Path | None, world: World) -> Metrics:
    return MetricsFile(folder.metrics, None if checkpoint is None else step) if world.is_main else NoMetrics()


def _finish(
    recipe: Recipe, folder: RunFolder, source: Path, console: Console, state: TrainingState, size: ModelSize
) -> None:
    """Picture, export and the last line; does only what is not done yet."""
    if state.skipped:
        _say(console, f"skipped  {state.skipped} steps without a target")
    kind = recipe.train.final
    if kind == "none":
        picture = on_main("drawing the report", lambda: str(write_report(folder.root)))
        _say(console, f"done     {state.step} steps; {folder.metrics}, {picture}, checkpoints in {folder.checkpoints}")
        return
    assert isinstance(state.model, MiMoV2FlashForCausalLM)  # made by build_model
    new = export_final(folder, source, state.model, state.masters, size, state.step, kind)
    _say(console, f"done     {state.step} steps; model in {folder.final}{'' if new else ' (was complete already)'}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
