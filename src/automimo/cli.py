"""The command line: one short function per verb. The work is done elsewhere and imported when a verb runs.

Only typer and the standard library are imported here, so that `automimo --help` answers at once. Every verb runs inside
`exit_code_of`, which turns what it raises into one message and an exit code.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, ParamSpec

import typer

from automimo import __version__
from automimo.cli_errors import exit_code_of
from automimo.errors import ConfigError

P = ParamSpec("P")
# Repeated from mimo_v2_flash.storage, which imports torch.
Target = Literal["bf16", "fp8", "mxfp4"]
Layout = Literal["split", "fused"]
SourceLayout = Literal["split", "fused", "contiguous"]
VScales = Literal["strip", "own"]
DEBUG = "--debug"


class _Options:
    """The options before the verb, set by `_global_options` on every call."""

    debug = False


_OPTIONS = _Options()

app = typer.Typer(
    name="automimo",
    help="Train and use models of the MiMo-V2 family.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `automimo` and `python -m automimo`; ends the process with an exit code.

    0: the work is done. 1: it failed. 2: the command line is wrong. 130: Ctrl-C. 143: SIGTERM, after saving.
    `--debug` may stand before or after the verb.
    """
    # Libraries would draw their progress bars and advice into our output; whoever wants them sets these variables.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP threads spin at barriers. Next to one busy process on two cores that made a 0.16 s training step take
        # 14 s; giving up after 10,000 rounds keeps it below 0.5 s and costs 11 % on an idle machine.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Python has no stream where the shell closed one (`>&-`), and what is written should then be lost, not fail.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process lives
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    given = list(sys.argv[1:] if arguments is None else arguments)
    if DEBUG in given:
        given.remove(DEBUG)
        given.insert(0, DEBUG)
    app(given, prog_name="automimo")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"automimo {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback acts
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    _OPTIONS.debug = debug


def verb(function: Callable[P, int | None]) -> Callable[P, None]:
    """Register `function` as the verb of its name; what it returns is the exit code (None is 0)."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(exit_code_of(lambda: function(*args, **kwargs), debug=_OPTIONS.debug))

    app.command(function.__name__)(guarded)
    return guarded


@verb
def init(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; must not exist, or be empty.")],
    preset: Annotated[str, typer.Option(help="Name of the preset, for example tiny or flash.")],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weights.")] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder whose tokenizer files are copied.")] = None,
) -> int:
    """Make a model folder with new weights from a preset."""
    from automimo.init_model import run_init

    return run_init(out, preset, seed=seed, tokenizer_folder=tokenizer)


@verb
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Other values for keys, as in optim.lr=1e-5.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes to train with on this machine.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    world_size: Annotated[
        int | None, typer.Option(min=2, help="With --dry-run: processes whose share of memory and traffic to count.")
    ] = None,
) -> int:
    """Train as a recipe says; the same command resumes."""
    from automimo.launch import launch, refuse_second_launch
    from automimo.training import load_recipe

    if world_size is not None and not dry_run:
        raise ConfigError(
            f"--world-size {world_size} is for --dry-run, which counts the share of one of so many processes: add "
            "--dry-run, or start them with --nproc or torchrun"
        )
    if nproc is not None:
        refuse_second_launch()
    if "RANK" in os.environ:
        # Where a peer dies torch's store warns with a page of C++ frames, on every rank; its errors come as exceptions.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    loaded = load_recipe(recipe, overrides or ())
    if nproc is not None and nproc > 1 and not dry_run:
        return launch(nproc, [*[DEBUG] * _OPTIONS.debug, "train", "--", str(recipe), *(overrides or ())])
    # After the recipe, so that a mistake in it is told at once and not when torch has been imported.
    if world_size is not None:
        from automimo.training.rehearsal import run_rehearsal

        return run_rehearsal(loaded, world_size)
    from automimo.training import run_training

    return run_training(loaded, dry_run=dry_run, ranks=nproc)


@verb
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or Hub id.")],
    prompt: Annotated[str, typer.Option(help="What the user says.")],
    system: Annotated[str | None, typer.Option(help="System text; default: the one of the chat template.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens that hold this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many most likely tokens; 0: from all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model reason before it answers.")] = False,
) -> int:
    """Ask a model one question."""
    from automimo.answer import run_generate
    from automimo.generate import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, seed)
    return run_generate(model, prompt, sampling, system=system, thinking=thinking)


@verb
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or Hub id.")],
    data: Annotated[str, typer.Option(help="JSONL file of chats or texts, data set, or python_docs.")],
    kind: Annotated[str | None, typer.Option(help="chat, text or hf; default: seen from the data.")] = None,
) -> int:
    """Loss of a model on held-out data."""
    from automimo.evaluate import run_evaluate

    return run_evaluate(model, data, kind)


@verb
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Recipe file (YAML), checkpoint folder or cached Hub id.")
    ],
    samples: Annotated[int, typer.Option(min=1, help="Of a recipe: how many samples to show.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a recipe: tokens of each sample to show.")] = 400,
    source_layout: Annotated[SourceLayout | None, typer.Option(help="Of a folder: what its files do not tell.")] = None,
    source_tp: Annotated[int | None, typer.Option(min=1, help="Of a folder: shards of its fused attention.")] = None,
    flash_v_scales: Annotated[VScales, typer.Option(help="Of a folder: how V2-Flash scales V.")] = "strip",
) -> int:
    """Show samples of a recipe, or what a checkpoint holds.

    Of a recipe: its first samples and their loss mask. Of a checkpoint: how it is stored and what is wrong with it; the
    exit code is 1 when something is.
    """
    if Path(path).is_file() or path.endswith((".yaml", ".yml")):
        from automimo.inspect_recipe import run_inspect

        return run_inspect(Path(path), samples, max_tokens)
    from automimo.inspect_checkpoint import run_inspect_checkpoint
    from automimo.mimo_v2_flash.storage import SourceOptions

    return run_inspect_checkpoint(path, SourceOptions(source_layout, source_tp, flash_v_scales))


@verb
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Model folder or Hub id, in any layout.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make; must not exist, or be empty.")],
    to: Annotated[Target | None, typer.Option(help="What the text part is stored in.")] = None,
    layout: Annotated[
        Layout | None, typer.Option(help="Attention of the target; default: split for bf16, else as released.")
    ] = None,
    checkpoint_tp: Annotated[int | None, typer.Option(min=1, help="Shards of a fused target.")] = None,
    like: Annotated[
        str | None, typer.Option(help="Reference checkpoint that decides the form instead of --to.")
    ] = None,
    source_layout: Annotated[SourceLayout | None, typer.Option(help="Of SRC: what its files do not tell.")] = None,
    source_tp: Annotated[int | None, typer.Option(min=1, help="Of SRC: shards of its fused attention.")] = None,
    like_layout: Annotated[SourceLayout | None, typer.Option(help="Of --like: what its files do not tell.")] = None,
    like_tp: Annotated[int | None, typer.Option(min=1, help="Of --like: shards of its fused attention.")] = None,
    flash_v_scales: Annotated[VScales, typer.Option(help="How V2-Flash scales V.")] = "strip",
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; default: one per core.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read the result again and compare.")] = False,
) -> int:
    """Write a checkpoint in another layout or quantisation.

    The same command again goes on where an interrupted one stopped.
    """
    from automimo.convert import ConvertOptions, run_convert
    from automimo.mimo_v2_flash.storage import SourceOptions

    source_options = SourceOptions(source_layout, source_tp, flash_v_scales)
    reference_options = SourceOptions(like_layout, like_tp, flash_v_scales)
    options = ConvertOptions(to, layout, checkpoint_tp, source_options, reference_options)
    return run_convert(source, target, options, like=like, workers=workers, verify=verify)


@verb
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]) -> int:
    """Draw the loss picture of a run, print its card."""
    from automimo.report import run_report

    return run_report(run)


@verb
def doctor() -> int:
    """Check this installation and machine."""
    from automimo.doctor import run_doctor

    return run_doctor()
