"""The verb `convert`: open, plan, write beside the target, verify, rename."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from automimo.checkpoint import CheckpointReader, copy_side_files, list_side_files, write_text_atomic
from automimo.checkpoint.parallel_writer import Progress, write_units
from automimo.checkpoint.work_folder import work_folder, work_path
from automimo.convert.plan import Conversion, ConvertOptions, plan_conversion
from automimo.convert.progress import ByteProgress
from automimo.convert.verify import Verification, verify_conversion
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.model import model_class_of
from automimo.mimo_v2_flash.source import read_config, resolve_folder
from automimo.mimo_v2_flash.storage import SourceOptions, StoredCheckpoint
from automimo.mimo_v2_flash.storage.transfer import How

# A worker holds a few copies of the matrix it works on; more than this many gain nothing on one disk.
MOST_WORKERS = 16


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    options: ConvertOptions,
    *,
    like: str | Path | None = None,
    workers: int | None = None,
    verify: bool = False,
    console: Console | None = None,
    progress: Console | None = None,
) -> Conversion:
    """Write `source` (a folder or Hub id) as the new folder `target`, in the form that `options.to` or `like` says.

    The target appears complete or not at all: it is written under a hidden name beside it and renamed. A run that was
    interrupted or killed goes on where it was when called again with the same arguments; an error leaves nothing.
    `workers` threads (default: one per core) hold one matrix each. With `verify` the new folder is read again and
    compared before it gets its name. What is done is told on `console` (default: stdout), how far it is on `progress`
    (default: stderr). Returns what was done.

    Raises CheckpointError for a target that exists, too little disk, and everything that is wrong with the source.
    """
    progress = progress or console or Console(stderr=True)
    console = console or Console()
    if (options.to is None) == (like is None):
        raise CheckpointError("give either --to bf16, fp8 or mxfp4, or --like REFERENCE")
    if like is not None and (options.layout is not None or options.tp is not None):
        raise CheckpointError("--layout and --checkpoint-tp belong to --to; with --like the reference decides")
    workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS) if workers is None else workers
    folder = resolve_folder(source)
    _check_place(folder, Path(target))
    with ExitStack() as stack:
        opened = stack.enter_context(_opened(folder, options.source))
        reference = None
        if like is not None:
            like_folder = resolve_folder(like)
            _check_place(like_folder, Path(target))
            reference = stack.enter_context(_opened(like_folder, options.reference, "--like-tp, --like-layout"))
        conversion = plan_conversion(opened, options, reference)
        list_side_files(conversion.side)  # a file that cannot be carried is told now, not after hours of writing
        _say(console, describe_plan(conversion))
        for warning in conversion.warnings:
            _say(console, f"warning  {warning}")
        marks = conversion.file_marks()
        with work_folder(target, conversion.fingerprint()) as content:
            started = time.monotonic()
            with ByteProgress(progress, "convert") as display:
                write_units(
                    content,
                    conversion.units,
                    conversion.files,
                    workers=workers,
                    metadata=conversion.metadata,
                    on_progress=display.show,
                )
            text = json.dumps(dict(conversion.config), indent=2, allow_nan=False)
            write_text_atomic(content / "config.json", f"{text}\n")
            copy_side_files(conversion.side, content)
            if conversion.file_marks() != marks:
                raise CheckpointError(f"{folder}: its files changed while they were converted; convert again")
            seconds = time.monotonic() - started
            moved = conversion.read_bytes + conversion.written_bytes
            _say(
                console,
                f"wrote    {_size(conversion.written_bytes)} in {seconds:.1f} s, {moved / seconds / 1e9:.2f} GB/s",
            )
            _say(console, describe_tally(conversion))
            if verify:
                _say(console, describe_verification(_verify(conversion, content, workers, options, progress)))
    _say(console, f"done     {target}")
    return conversion


def run_convert(
    source: str,
    target: Path,
    options: ConvertOptions,
    *,
    like: str | None,
    workers: int | None,
    verify: bool,
) -> int:
    """The verb `convert`."""
    try:
        convert_checkpoint(source, target, options, like=like, workers=workers, verify=verify)
    except KeyboardInterrupt:
        print(f"stopped  the same command goes on; to give up, remove {work_path(target)}")
        raise
    return 0


def describe_plan(conversion: Conversion) -> str:
    """One line: from which form to which, and how many bytes."""
    source = conversion.source
    tp = source.description.tp
    known = "" if tp is None else f", checkpoint TP {tp.size} from {tp.found_by}"
    return (
        f"source   {source.reader.folder}: {source.description.layout} attention{known}, "
        f"{len(source.reader.tensors):,} tensors, {_size(conversion.read_bytes)} to read, "
        f"{_size(conversion.written_bytes)} to write in {len(conversion.files)} file(s)"
    )


def describe_tally(conversion: Conversion) -> str:
    """One line: how many tensors went which way (of those that this run wrote)."""
    tally = conversion.tally
    words: dict[How, str] = {
        "copied": "copied byte for byte",
        "converted": "decoded, cast or rearranged",
        "unchanged": "equal to the reference, its bytes kept",
        "borrowed": "taken from the reference",
        "encoded": "quantised anew",
    }
    told = [f"{tally[how]:,} {text}" for how, text in words.items() if tally[how]]
    return f"tensors  {'; '.join(told) or 'all were written by the interrupted run'}"


def describe_verification(found: Verification) -> str:
    """One line: what the comparison showed."""
    told = [f"{found.equal:,} tensors equal the source"]
    if found.kept:
        told.append(f"{found.kept:,} have the bytes of the reference")
    if found.encoded:
        told.append(
            f"{found.encoded:,} quantised anew, largest difference "
            + ", ".join(
                f"{steps:.3f} {name} steps"
                for name, steps in (("e4m3", found.fp8_steps), ("e2m1", found.mxfp4_steps))
                if steps
            )
        )
    return f"verified {'; '.join(told)}"


@contextmanager
def _opened(folder: Path, options: SourceOptions, told_by: str | None = None) -> Iterator[StoredCheckpoint]:
    """A checkpoint to read; `told_by` names the options for it when they are not those of a source."""
    config = read_config(folder, model_class_of(folder).config_class)
    with CheckpointReader(folder) as reader:
        try:
            stored = StoredCheckpoint(reader, config, options)
        except CheckpointError as error:
            hint = "" if told_by is None else f"\nThis is the reference; for it the options are {told_by}"
            raise CheckpointError(f"{error}{hint}") from error
        yield stored


def _verify(
    conversion: Conversion, content: Path, workers: int, options: ConvertOptions, progress: Console
) -> Verification:
    started = time.monotonic()
    done, total = 0, conversion.written_bytes
    with ByteProgress(progress, "verify") as display:

        def on_bytes(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            display.show(Progress(done, total, time.monotonic() - started))

        return verify_conversion(
            conversion, content, workers=workers, v_scales=options.source.v_scales, on_bytes=on_bytes
        )


def _check_place(read: Path, target: Path) -> None:
    here = Path(os.path.abspath(target))  # noqa: PTH100 -- resolve() would follow a link at the last step
    if here.parent.resolve().is_relative_to(read.resolve()):
        raise CheckpointError(f"{target}: lies inside {read}, which is read; choose a folder outside it")


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
