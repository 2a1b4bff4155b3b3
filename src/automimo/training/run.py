"""`automimo train`: from a recipe to a finished run folder."""

from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from automimo.checkpoint import write_text_atomic
from automimo.checkpoint.resume import tidy_steps
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.report import write_report
from automimo.training.export import export_final
from automimo.training.loop import Loop, train_loop
from automimo.training.metrics import MetricsFile, inherit_metrics
from automimo.training.optimizer import make_optimizer, select_trainable
from automimo.training.precision import MasterWeights
from automimo.training.progress import step_display
from automimo.training.recipe import Recipe, check_schedule
from automimo.training.recipe_file import dump_recipe
from automimo.training.run_folder import RunFolder, find_checkpoint
from automimo.training.setup import (
    build_model,
    check_source,
    load_data,
    load_fitting_tokenizer,
    model_folder,
    training_device,
)
from automimo.training.state import (
    TrainingState,
    check_recipe,
    check_steps,
    load,
    restore,
    save,
    seed_everything,
)
from automimo.training.stop import stop_on_signals
from automimo.training.summary import ModelSize, describe, model_size, total_steps


def run_training(recipe: Recipe, *, dry_run: bool = False, console: Console | None = None) -> int:
    """Train as `recipe` says; returns the exit code: 0 when the run is complete, 143 or 130 when it saved and stopped
    on SIGTERM or SIGINT.

    Everything that happens follows from the recipe, its data and the files in its run folder, and each stage (new
    model, steps, evaluation, final export) appears complete or not at all. So the same call again after any kill
    continues, and ends with the weights of an undisturbed run. `dry_run` loads the data, builds the model without
    memory, prints what would happen and writes nothing.

    Raises ConfigError, DataError, CheckpointError or TrainingError.
    """
    console = console or Console()
    folder = RunFolder(recipe.folder)
    if dry_run:
        _dry_run(recipe, folder, console)
        return 0
    with folder.locked():
        return _train(recipe, folder, console)


def _dry_run(recipe: Recipe, folder: RunFolder, console: Console) -> None:
    with model_folder(recipe, folder, write=False) as source:
        data = load_data(recipe, load_fitting_tokenizer(source))
        total = total_steps(recipe, data)
        check_schedule(recipe.optim, total)
        model = build_model(recipe, source, load_weights=False, device=torch.device("meta"))
        check_source(recipe, source, model)
        trainable, _ = select_trainable(model, recipe.model, recipe.moe)
        make_optimizer(MasterWeights(model, torch.float32).trainable, recipe.optim)  # its patterns are checked
        size = model_size(model, trainable)
        for line in describe(recipe, model.config, size, data, total):
            _say(console, line)
    checkpoint = find_checkpoint(recipe)
    if checkpoint is not None:
        _, saved = load(checkpoint)
        check_recipe(saved, recipe, checkpoint)
        check_steps(saved, total, checkpoint)
    _say(
        console,
        f"dry run  would start from {checkpoint or 'the beginning'} and write to {folder.root}; nothing written",
    )


def _train(recipe: Recipe, folder: RunFolder, console: Console) -> int:
    checkpoint = find_checkpoint(recipe)
    loaded = None
    if checkpoint is not None:
        loaded = load(checkpoint)
        check_recipe(loaded[1], recipe, checkpoint)
    with model_folder(recipe, folder, write=True) as source:
        data = load_data(recipe, load_fitting_tokenizer(source))
        total = total_steps(recipe, data)
        check_schedule(recipe.optim, total)
        seed_everything(recipe.train.seed)
        model = build_model(recipe, source, load_weights=loaded is None, device=training_device())
        trainable, _ = select_trainable(model, recipe.model, recipe.moe)
        size = model_size(model, trainable)
        masters = MasterWeights(model, getattr(torch, recipe.model.dtype))
        state = TrainingState(model, masters, make_optimizer(masters.trainable, recipe.optim), data.train)
        if loaded is not None and checkpoint is not None:
            check_steps(loaded[1], total, checkpoint)
            restore(state, *loaded, checkpoint)
        for line in describe(recipe, model.config, size, data, total):
            _say(console, line)
        if checkpoint is not None:
            _say(console, f"resume   from {checkpoint}")
        write_text_atomic(folder.recipe, dump_recipe(recipe))
        loaded_step = state.step if loaded is not None else None
        own = checkpoint is not None and checkpoint.parent == folder.checkpoints
        if own:
            tidy_steps(folder.checkpoints, keep=recipe.train.keep)
        elif checkpoint is not None:
            inherit_metrics(checkpoint, folder.metrics)
        del loaded  # the loaded tensors have been copied
        with stop_on_signals() as stop, closing(MetricsFile(folder.metrics, loaded_step)) as metrics:
            display = step_display(console, state.step, total)
            with closing(display):
                save_state = partial(save, state, recipe, folder.checkpoints)
                loop = Loop(recipe, total, data.validation, metrics, display, stop, save_state)
                train_loop(state, loop, saved=own)
        if stop:
            _say(console, f"stopped  at step {state.step}, saved; run the same command to go on")
            return stop.exit_code
        _finish(recipe, folder, source, console, state, size)
    return 0


def _finish(
    recipe: Recipe, folder: RunFolder, source: Path, console: Console, state: TrainingState, size: ModelSize
) -> None:
    """Picture, export and the last line; does only what is not done yet."""
    if state.skipped:
        _say(console, f"skipped  {state.skipped} steps without a target")
    kind = recipe.train.final
    if kind == "none":
        picture = write_report(folder.root)
        _say(console, f"done     {state.step} steps; {folder.metrics}, {picture}, checkpoints in {folder.checkpoints}")
        return
    assert isinstance(state.model, MiMoV2FlashForCausalLM)  # made by build_model
    new = export_final(folder, source, state.model, state.masters, size, state.step, kind)
    _say(console, f"done     {state.step} steps; model in {folder.final}{'' if new else ' (was complete already)'}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
