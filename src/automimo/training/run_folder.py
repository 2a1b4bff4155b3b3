"""The run folder: who may write to it, and where a run starts from.

OUTPUT/recipe.yaml         resolved recipe of the last start
OUTPUT/metrics.jsonl       see metrics.py
OUTPUT/init/               the new model of a `model.preset` run, as a Hugging Face folder
OUTPUT/checkpoints/step-N/ training states
OUTPUT/final/              the result, as a Hugging Face folder
OUTPUT/loss.png
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from automimo.checkpoint.resume import STATE_FILE, newest_step
from automimo.errors import ConfigError, TrainingError
from automimo.training.recipe import Recipe


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def init(self) -> Path:
        return self.root / "init"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def final(self) -> Path:
        return self.root / "final"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and hold it alone; a killed process lets go of it by itself. A folder that was made here and
        is still empty at the end (a mistake in the recipe stopped the run) is removed again.

        Raises TrainingError when another process holds it, ConfigError when it cannot be made.
        """
        made = not self.root.exists()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"output: {self.root} cannot be used as a run folder: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TrainingError(
                    f"{self.root}: another process is training in this folder; wait for it, or choose another output"
                ) from error
            except OSError:
                pass  # a network disk without locks
            yield
        finally:
            if made:
                with suppress(OSError):  # not empty
                    self.root.rmdir()
            os.close(descriptor)


def find_checkpoint(recipe: Recipe) -> Path | None:
    """The checkpoint that a run of `recipe` starts from; None: from the beginning.

    The newest checkpoint of `output` always comes first, so that repeating a command goes on where it stopped;
    `train.resume: PATH` (a checkpoint, or a run folder, whose newest one is taken) starts an output that has none.
    Raises ConfigError when PATH holds no checkpoint, and for `train.resume: never` in an output that has one.
    """
    own = newest_step(RunFolder(recipe.folder).checkpoints)
    resume = recipe.train.resume
    if resume == "never" and own is not None:
        raise ConfigError(
            f"train.resume is never, but {recipe.output} already holds a run ({own.name}): choose another output, or "
            "delete that folder"
        )
    if own is not None or resume in ("auto", "never"):
        return own
    path = Path(resume).expanduser()
    if (path / STATE_FILE).is_file():
        return path
    found = newest_step(path / "checkpoints") or newest_step(path)
    if found is None:
        raise ConfigError(
            f"train.resume: {resume} is neither a checkpoint folder (step-N with {STATE_FILE}) nor a run folder with "
            "checkpoints"
        )
    return found
