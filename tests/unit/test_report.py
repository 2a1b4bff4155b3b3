"""The loss picture and the model card of a run folder."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from automimo.errors import DataError
from automimo.report import model_card, read_metrics, smooth, write_report

RECIPE = """
output: runs/x
model: {path: null, preset: tiny}
data:
  train: [{kind: python_docs}, {kind: chat, path: "a|b.jsonl"}]
  validation: [{kind: python_docs}]
  sequence_length: 512
train: {steps: 40, batch: 8}
"""


def step_row(step: int, loss: float) -> dict[str, float]:
    return {"step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3 / step, "tokens": 100, "seconds": 0.5}


def make_run(folder: Path, steps: int = 40) -> Path:
    folder.mkdir(parents=True)
    rows: list[dict[str, float]] = [{"step": 0, "validation_loss": 8.0}]
    for step in range(1, steps + 1):
        rows.append(step_row(step, 2 + 6 / step))
        if step % 10 == 0:
            rows.append({"step": step, "validation_loss": 2.5 + 6 / step})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def test_metrics_are_read_in_columns(tmp_path: Path) -> None:
    metrics = read_metrics(make_run(tmp_path / "demo"))
    assert metrics.steps == tuple(range(1, 41))
    assert metrics.losses[0] == 8.0
    assert metrics.total_tokens == 4000
    assert metrics.evaluated_steps == (0, 10, 20, 30, 40)
    assert metrics.validation_losses[1] == pytest.approx(3.1)
    assert not metrics.torn


def test_a_torn_last_line_is_skipped_and_repeated_steps_count_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", steps=5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_row(4, 1.25)) + "\n")
        file.write(json.dumps(step_row(5, 1.0)) + "\n")
        file.write('{"step": 6, "lo')
    metrics = read_metrics(run)
    assert metrics.torn
    assert metrics.steps == (1, 2, 3, 4, 5)
    assert metrics.losses[3:] == (1.25, 1.0)
    assert metrics.total_tokens == 500
    assert write_report(run).is_file()


def test_a_skipped_step_is_no_point_of_the_curve(tmp_path: Path) -> None:
    rows = [step_row(1, 3.0), {**step_row(2, 0.0), "loss": None, "tokens": 0}, step_row(3, 2.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = read_metrics(tmp_path)
    assert metrics.steps == (1, 3)
    assert metrics.losses == (3.0, 2.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "no training step"),
        ('{"step": 0, "validation_loss": 3.0}\n', "no training step"),
        ('{"step": 1}\nnot json\n', r"metrics\.jsonl:2: not a JSON object"),
        ("[1, 2]\n", r"metrics\.jsonl:1: expected a JSON object, found list"),
        ('{"loss": 3.0}\n', "step must be a number, is None"),
        ('{"step": 1, "loss": "high", "lr": 1, "tokens": 1, "seconds": 1}\n', "loss must be a number, is 'high'"),
        ('{"step": 1, "loss": true, "lr": 1, "tokens": 1, "seconds": 1}\n', "loss must be a number, is True"),
        ('{"step": 1, "loss": 2.0, "tokens": 1, "seconds": 1}\n', "lr must be a number"),
    ],
)
def test_unusable_metrics_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        write_report(tmp_path)
    assert not (tmp_path / "loss.png").exists()


def test_a_missing_run_folder_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such run folder.*automimo train"):
        read_metrics(tmp_path / "nowhere")


def test_smooth_equals_the_weighted_mean_it_stands_for() -> None:
    values = [5.0, 3.0, 4.0, 1.0, 2.0, 2.5]
    span = 3
    alpha = 2 / (span + 1)
    for end in range(1, len(values) + 1):
        weights = [alpha * (1 - alpha) ** (end - 1 - i) for i in range(end)]
        mean = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert smooth(values, span)[end - 1] == pytest.approx(mean, rel=1e-12)
    assert smooth([7.0] * 4, 10) == pytest.approx([7.0] * 4)
    assert smooth([2.0, math.nan, math.inf, 2.0], 3) == pytest.approx([2.0] * 4)
    assert math.isnan(smooth([math.nan, 1.0], 3)[0])
    with pytest.raises(ValueError, match="span"):
        smooth(values, 0)


def colour_share(path: Path, rgb: tuple[int, int, int]) -> float:
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return float((np.abs(pixels - np.array(rgb)).max(axis=-1) < 12).mean())


def test_the_picture_shows_both_curves_at_readme_size(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "demo"))
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (960, 540)
    blue, red = (0x4C, 0x78, 0xA8), (0xE4, 0x57, 0x56)
    assert colour_share(path, blue) > 5e-4
    assert colour_share(path, red) > 5e-4
    assert sorted(p.name for p in path.parent.iterdir()) == ["loss.png", "metrics.jsonl", "recipe.yaml"]


@pytest.mark.parametrize("steps", [1, 2, 3000])
def test_short_and_long_runs_are_drawn(tmp_path: Path, steps: int) -> None:
    run = make_run(tmp_path / "demo", steps=steps)
    (run / "loss.png").write_bytes(b"an older picture")
    assert write_report(run).read_bytes().startswith(b"\x89PNG")


def test_a_run_without_evaluation_or_learning_rate_is_drawn(tmp_path: Path) -> None:
    rows = [{**step_row(i, 3.0), "lr": 0.0} for i in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_report(tmp_path)
    assert colour_share(path, (0xE4, 0x57, 0x56)) < 1e-5


def test_the_model_card_states_what_the_run_did(tmp_path: Path) -> None:
    card = model_card(make_run(tmp_path / "demo"), parameters=3_100_000, active_parameters=1_400_000)
    assert card.startswith("---\n")
    assert "# demo\n" in card
    assert "| start | new weights of the preset `tiny` |" in card
    assert "| parameters | 3,100,000, 1,400,000 active per token |" in card
    assert "python_docs, chat `a\\|b.jsonl`" in card
    assert "| steps | 40 of 8 rows, 512 tokens each |" in card
    assert "| target tokens | 4,000 |" in card
    assert "| training loss | 8.0000 (first step), 2.1500 (last step) |" in card
    assert "| held-out loss | 8.0000 (step 0), 2.6500 (step 40) |" in card


def test_the_model_card_needs_a_recipe(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo")
    (run / "recipe.yaml").write_text("model: 3")
    with pytest.raises(DataError, match="not a resolved recipe"):
        model_card(run)
    (run / "recipe.yaml").write_text("a: [")
    with pytest.raises(DataError, match="cannot be read as YAML"):
        model_card(run)
    (run / "recipe.yaml").unlink()
    with pytest.raises(DataError, match="no such file"):
        model_card(run)
