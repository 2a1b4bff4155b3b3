"""What a run folder says about its run: the loss picture and the model card. Reads files only; imports no torch.

A run folder holds `metrics.jsonl` (one object per step, one per evaluation) and `recipe.yaml` (resolved).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from automimo import __version__
from automimo.errors import DataError

METRICS = "metrics.jsonl"
RECIPE = "recipe.yaml"
PICTURE = "loss.png"
CARD = "README.md"


@dataclass(frozen=True)
class Metrics:
    """Columns of `metrics.jsonl`, in the order of steps; losses in nats per token, `tokens` are valid targets."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    learning_rates: tuple[float, ...]
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    evaluated_steps: tuple[int, ...]
    validation_losses: tuple[float, ...]
    torn: bool

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens)


def read_metrics(run: Path) -> Metrics:
    """Read `metrics.jsonl` of a run folder.

    A last line without its newline is what a killed process leaves behind: it is skipped and `torn` is set. A step
    that appears twice (the run was killed after a checkpoint and repeated it) counts once, with its last values. A
    step whose loss is null (no token to learn from) is left out.
    Raises DataError: the folder or file is missing, a line is not a metrics object (file and line are named), or there
    is no training step yet.
    """
    path = run / METRICS
    if not run.is_dir():
        raise DataError(f"{run}: no such run folder; `automimo train RECIPE` makes one at the recipe's `output`")
    if not path.is_file():
        raise DataError(f"{path}: no such file, so {run} is not a run folder (or its run has not started yet)")
    lines = path.read_bytes().split(b"\n")
    torn = bool(lines.pop().strip())
    train: dict[int, tuple[float, float, int, float]] = {}
    validation: dict[int, float] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _read_line(line, f"{path}:{number}", train, validation)
    if not train:
        raise DataError(f"{path}: holds no training step yet; run the recipe for at least one step first")
    steps = sorted(train)
    columns = list(zip(*(train[step] for step in steps), strict=True))
    evaluated = sorted(validation)
    return Metrics(
        steps=tuple(steps),
        losses=columns[0],
        learning_rates=columns[1],
        tokens=columns[2],
        seconds=columns[3],
        evaluated_steps=tuple(evaluated),
        validation_losses=tuple(validation[step] for step in evaluated),
        torn=torn,
    )


def _read_line(
    line: bytes, where: str, train: dict[int, tuple[float, float, int, float]], validation: dict[int, float]
) -> None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a JSON object ({error}); remove the line, or restore the file") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    step = _number(row, "step", where)
    if "validation_loss" in row:
        validation[int(step)] = _number(row, "validation_loss", where)
    if row.get("loss") is not None:
        train[int(step)] = (
            _number(row, "loss", where),
            _number(row, "lr", where),
            int(_number(row, "tokens", where)),
            _number(row, "seconds", where),
        )


def _number(row: dict[str, Any], key: str, where: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{where}: {key} must be a number, is {value!r}")
    return value


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Exponential moving average with the memory of about `span` values, unbiased from the first value on.

    m_t = (1 - a) m_{t-1} + a x_t with a = 2 / (span + 1), divided by 1 - (1 - a)^t. Values that are not finite are
    passed over (the average holds).
    """
    if span < 1:
        raise ValueError(f"span: must be at least 1, is {span}")
    alpha = 2 / (span + 1)
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean = (1 - alpha) * mean + alpha * value
            weight = (1 - alpha) * weight + alpha
        out.append(mean / weight if weight else math.nan)
    return out


def write_report(run: Path) -> Path:
    """Draw `loss.png` of a run folder and return its path; replaces an older one only when the new one is complete."""
    metrics = read_metrics(run)
    target = run / PICTURE
    partial = run / f".{PICTURE}.partial"
    try:
        _draw(metrics, run.resolve().name, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _draw(metrics: Metrics, title: str, path: Path) -> None:
    # The object interface with its own canvas: no pyplot state, no display, and it works inside a training process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rate = axes.twinx()
    rate.fill_between(metrics.steps, metrics.learning_rates, color="0.55", alpha=0.13, linewidth=0)
    rate.set_ylabel("learning rate", color="0.5", fontsize=9)
    rate.tick_params(axis="y", colors="0.5", labelsize=8)
    # Two and a half times the peak keeps the shaded schedule in the lower part, under the curves.
    rate.set_ylim(0, 2.5 * max(*metrics.learning_rates, 1e-12))
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    # The losses go on top of the schedule.
    axes.set_zorder(rate.get_zorder() + 1)
    axes.patch.set_visible(False)

    one_point = len(metrics.steps) == 1
    axes.plot(
        metrics.steps, metrics.losses, color="#4c78a8", alpha=0.35, linewidth=0.9, marker="o" if one_point else None
    )
    smoothed = smooth(metrics.losses, max(5, len(metrics.losses) // 25))
    axes.plot(metrics.steps, smoothed, color="#4c78a8", linewidth=2, label=f"training, last {smoothed[-1]:.3f}")
    if metrics.evaluated_steps:
        last = metrics.validation_losses[-1]
        axes.plot(
            metrics.evaluated_steps,
            metrics.validation_losses,
            color="#e45756",
            linewidth=1.6,
            marker="o",
            markersize=5,
            label=f"held out, last {last:.3f}",
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.25)
    axes.set_title(f"{title}: {metrics.steps[-1]:,} steps, {metrics.total_tokens:,} target tokens", fontsize=12)
    axes.legend(frameon=False)
    axes.spines["top"].set_visible(False)
    rate.spines["top"].set_visible(False)
    figure.savefig(path, format="png", metadata={"Software": None})


def model_card(run: Path, *, parameters: int | None = None, active_parameters: int | None = None) -> str:
    """The text of `final/README.md`: what the model is, what it was trained on, how it did and how to load it.

    Everything is taken from the run folder; `parameters` and `active_parameters` (per token) are counts of the exported
    model, left out of the card when None. Raises DataError when `metrics.jsonl` or `recipe.yaml` cannot be read.
    """
    metrics = read_metrics(run)
    recipe = _read_recipe(run / RECIPE)
    name = run.resolve().name
    model, train, data = recipe["model"], recipe["train"], recipe["data"]
    base = model.get("path")
    start = f"`{base}`" if base else f"new weights of the preset `{model.get('preset')}`"
    facts = [("start", start)]
    if parameters is not None:
        active = f", {active_parameters:,} active per token" if active_parameters is not None else ""
        facts.append(("parameters", f"{parameters:,}{active}"))
    facts += [
        ("training data", _sources(data["train"])),
        ("held-out data", _sources(data.get("validation") or [])),
        ("steps", f"{metrics.steps[-1]:,} of {train['batch']} rows, {data['sequence_length']:,} tokens each"),
        ("target tokens", f"{metrics.total_tokens:,}"),
        ("training loss", f"{metrics.losses[0]:.4f} (first step), {metrics.losses[-1]:.4f} (last step)"),
    ]
    if metrics.evaluated_steps:
        first, last = metrics.validation_losses[0], metrics.validation_losses[-1]
        at_first, at_last = metrics.evaluated_steps[0], metrics.evaluated_steps[-1]
        facts.append(("held-out loss", f"{first:.4f} (step {at_first:,}), {last:.4f} (step {at_last:,})"))
    facts.append(("made with", f"AutoMiMo {__version__}"))
    table = "\n".join(f"| {key} | {_cell(value)} |" for key, value in facts)
    return f"""---
tags:
- automimo
- mimo-v2
pipeline_tag: text-generation
---

# {name}

Losses are in nats per target token.

| | |
|---|---|
{table}

## Use

```bash
automimo generate PATH_OF_THIS_FOLDER --prompt "..."
```

```python
from automimo import MiMoV2FlashForCausalLM

model = MiMoV2FlashForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER")
```

The tokenizer and its chat template are in this folder (`transformers.AutoTokenizer`).
"""


def run_report(run: Path) -> int:
    """The verb `report`: draw the picture again, print the model card."""
    picture = write_report(run)
    print(model_card(run))
    if read_metrics(run).torn:
        print(f"The last line of {run / METRICS} is cut off (the run was killed or is running); it is left out.")
    print(f"picture: {picture}")
    return 0


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        recipe = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; a run folder holds the resolved recipe of its run") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as YAML: {error}") from error
    sections = ("model", "data", "train")
    if not isinstance(recipe, dict) or any(not isinstance(recipe.get(section), dict) for section in sections):
        raise DataError(f"{path}: is not a resolved recipe: it needs the sections {', '.join(sections)}")
    return recipe


def _sources(sources: Sequence[dict[str, Any]]) -> str:
    names = [source["kind"] + (f" `{source['path']}`" if source.get("path") else "") for source in sources]
    return ", ".join(names) or "none"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
