"""What two runs have in common: all, bit for bit, or all but rounding."""

import json
from pathlib import Path
from typing import Any


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")} for row in rows(run)]


def last_values(run: Path) -> dict[str, Any]:
    """The JSON state of the newest checkpoint."""
    from automimo.checkpoint.resume import newest_step

    newest = newest_step(run / "checkpoints")
    assert newest is not None
    state: dict[str, Any] = json.loads((newest / "state.json").read_text())["state"]
    return state


ROUNDED = {"loss", "grad_norm", "validation_loss"}


def assert_same_metrics(run: Path, expected: Path) -> None:
    """The same but for the rounding of sums in another order: 1e-5. Whatever is counted is equal."""
    ours, theirs = timeless(run), timeless(expected)
    assert [sorted(row) for row in ours] == [sorted(row) for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            if key in ROUNDED:
                assert abs(row[key] - value) <= 1e-5 * abs(value), (row["step"], key, row[key], value)
            else:
                assert row[key] == value, (row["step"], key)


def final_weights(run: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for file in (run / "final").glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal_runs(run: Path, expected: Path) -> None:
    """What `parallel` may change is the last bits alone."""
    import torch

    assert_same_metrics(run, expected)
    ours, theirs = last_values(run), last_values(expected)
    for key in ("step", "skipped_steps", "data_position", "data_fingerprint"):
        assert ours[key] == theirs[key], key
    mine, other = final_weights(run), final_weights(expected)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        if "e_score_correction_bias" in name:
            assert torch.equal(mine[name], tensor), name
        else:
            difference = (mine[name].double() - tensor.double()).norm()
            # Of the issue: after 5 steps of AdamW, which divides small noise by small roots.
            assert difference <= 1e-3 * tensor.double().norm(), (name, float(difference))
    assert_tidy(run)


def assert_identical_runs(run: Path, expected: Path) -> None:
    """Bit for bit: weights, optimizer, random states, metrics, the exported model."""
    import torch

    from automimo.checkpoint.resume import load_step, newest_step

    assert timeless(run) == timeless(expected)
    folders = [newest_step(folder / "checkpoints") for folder in (run, expected)]
    assert folders[0] is not None and folders[1] is not None and folders[0].name == folders[1].name
    (mine, state), (other, other_state) = load_step(folders[0]), load_step(folders[1])
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        assert torch.equal(mine[name], tensor), name
    for key in ("step", "skipped_steps", "data_position", "data_fingerprint"):
        assert state[key] == other_state[key], key
    names = [sorted(path.name for path in (folder / "final").iterdir()) for folder in (run, expected)]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith((".safetensors", ".json", ".jinja")):
            assert (run / "final" / name).read_bytes() == (expected / "final" / name).read_bytes(), name
    assert_tidy(run)


def assert_tidy(run: Path) -> None:
    """Nothing half done is left, and no more checkpoints than `train.keep`."""
    assert [path.name for path in run.rglob("*") if ".saving-" in path.name or ".tmp-" in path.name] == []
    assert {path.name for path in run.iterdir()} <= {"recipe.yaml", "metrics.jsonl", "loss.png", "checkpoints", "final"}
    assert len(list((run / "checkpoints").iterdir())) <= 2
