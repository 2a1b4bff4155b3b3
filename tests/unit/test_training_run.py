"""Whole runs of a very small model: resume bit for bit, kills, signals, exports, dry runs, metrics."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from automimo.checkpoint.resume import load_step
from automimo.errors import AutoMiMoError, ConfigError, TrainingError
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.presets import preset_config
from automimo.mimo_v2_flash.tokenizer import build_tokenizer
from automimo.training import parse_recipe, run_training
from automimo.training.recipe import Recipe

WORDS = ["gate", "expert", "window", "sink", "router", "token", "value", "norm", "query", "key", "layer", "stream"]
RECIPE = """
output: OUT
model: {path: BASE}
moe: {bias_update_speed: 0.01}
data:
  train:
    - {kind: text, path: DATA/train.jsonl}
  validation:
    - {kind: text, path: DATA/held.jsonl}
  sequence_length: 48
optim: {lr: 0.01, warmup_steps: 2}
train: {steps: 8, batch: 4, micro_batch: 2, evaluate_every: 4, save_every: 2, final: fp32}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of four layers and data that give seven rows per epoch."""
    root = tmp_path_factory.mktemp("base")
    rng = random.Random(0)
    for name, count in (("train", 18), ("held", 4)):
        lines = [json.dumps({"text": " ".join(rng.choices(WORDS, k=rng.randint(3, 9)))}) for _ in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = build_tokenizer([" ".join(rng.choices(WORDS, k=200))], 300)
    config = preset_config(
        "tiny",
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        hybrid_layer_pattern=[0, 1, 1],
        moe_layer_freq=[0, 1, 1],
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
    )
    torch.manual_seed(0)
    model = MiMoV2FlashForCausalLM.from_config(config)
    model.initialize_weights(dtype=torch.float32)
    model.save_pretrained(root / "model", tokenizer=tokenizer)
    return root


def recipe(base: Path, out: Path, *overrides: str) -> Recipe:
    text = RECIPE.replace("OUT", str(out)).replace("BASE", str(base / "model")).replace("DATA", str(base))
    return parse_recipe(text, overrides)


def run(base: Path, out: Path, *overrides: str, dry_run: bool = False) -> str:
    """Train in this process; returns what was printed."""
    console = Console(file=StringIO(), width=200)
    assert run_training(recipe(base, out, *overrides), dry_run=dry_run, console=console) == 0
    return console.file.getvalue()


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def timeless(out: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")} for row in rows(out)]


def state_of(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_step(out / "checkpoints" / f"step-{step}")[0]


def masters_of(out: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = state_of(out, step).items()
    return {name.removeprefix("model/"): value for name, value in tensors if name.startswith("model/")}


def assert_same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(base, out)
    return out


# --- a run and what it leaves ----------------------------------------------------------------------------------------


def test_what_a_run_leaves(base: Path, whole: Path):
    names = {path.name for path in whole.iterdir()}
    assert names == {"recipe.yaml", "metrics.jsonl", "loss.png", "checkpoints", "final"}
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step-6", "step-8"]
    assert parse_recipe((whole / "recipe.yaml").read_text()) == recipe(base, whole)

    steps = [row for row in rows(whole) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 9))
    for row in steps:
        keys = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "seconds", "load_cv", "dead_experts"}
        assert keys <= row.keys() and row["tokens"] > 0 and row["seconds"] > 0
    assert [row["lr"] for row in steps][:3] == pytest.approx([0.005, 0.01, 0.01])
    held = [(row["step"], row["validation_loss"]) for row in rows(whole) if "validation_loss" in row]
    assert [step for step, _ in held] == [0, 4, 8]
    assert held[2][1] < held[0][1] - 0.5


def test_the_final_model_holds_the_weights_of_the_last_step(base: Path, whole: Path):
    model = MiMoV2FlashForCausalLM.from_pretrained(str(whole / "final"))
    saved = masters_of(whole, 8)
    found = model.state_dict()
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(found[name], value), name
    card = (whole / "final" / "README.md").read_text()
    assert "loss.png" in card and (whole / "final" / "loss.png").stat().st_size > 1000
    assert (whole / "final" / "tokenizer.json").read_bytes() == (base / "model" / "tokenizer.json").read_bytes()


def test_running_a_complete_run_again_changes_nothing(base: Path, whole: Path):
    before = {path: path.stat().st_mtime_ns for path in (whole / "final").iterdir()}
    metrics = (whole / "metrics.jsonl").read_bytes()
    assert "was complete already" in run(base, whole)
    assert {path: path.stat().st_mtime_ns for path in (whole / "final").iterdir()} == before
    assert (whole / "metrics.jsonl").read_bytes() == metrics


def test_sinks_and_patterns_decide_what_moves(base: Path, tmp_path: Path):
    run(
        base,
        tmp_path / "a",
        "optim.warmup_steps=0",
        "train.steps=2",
        "train.final=none",
        "model.freeze=['*experts*', '*norm*']",
        "moe={router: freeze}",
    )
    start = MiMoV2FlashForCausalLM.from_pretrained(str(base / "model")).state_dict()
    end = masters_of(tmp_path / "a", 2)
    still = {name for name in start if torch.equal(start[name], end[name])}
    frozen = re.compile("experts|norm|attention_sink_bias|mlp.gate.weight|e_score_correction_bias")
    assert still == {name for name in start if frozen.search(name)}
    assert not (tmp_path / "a" / "final").exists() and (tmp_path / "a" / "loss.png").exists()


def test_bf16_keeps_fp32_masters(base: Path, tmp_path: Path, whole: Path):
    run(base, tmp_path / "a", "model.dtype=bfloat16")
    held = [row["validation_loss"] for row in rows(tmp_path / "a") if "validation_loss" in row]
    expected = [row["validation_loss"] for row in rows(whole) if "validation_loss" in row]
    # bf16 has 8 bits of mantissa; over 8 steps the loss stays within its rounding
    assert held == pytest.approx(expected, rel=0.02) and held != expected
    saved = masters_of(tmp_path / "a", 8)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert saved[name].dtype == torch.float32 and not torch.equal(saved[name], saved[name].bfloat16().float())
    final = MiMoV2FlashForCausalLM.from_pretrained(str(tmp_path / "a" / "final")).state_dict()
    assert torch.equal(final[name], saved[name])


def test_activation_checkpointing_changes_nothing(base: Path, tmp_path: Path, whole: Path):
    run(base, tmp_path / "a", "train.activation_checkpointing=true")
    for mine, expected in zip(timeless(tmp_path / "a"), timeless(whole), strict=True):
        assert mine == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_preset_starts_from_its_own_init_folder(base: Path, tmp_path: Path):
    overrides = ("model.path=null", "model.preset=tiny", "train.steps=1", "train.batch=1", "train.micro_batch=1")
    run(base, tmp_path / "a", *overrides, "data.validation=[]", "train.evaluate_every=0", "optim.warmup_steps=0")
    assert (tmp_path / "a" / "init" / "config.json").is_file()
    assert {path.name for path in (tmp_path / "a" / "final").iterdir()} >= {"config.json", "tokenizer.json"}
    with pytest.raises(ConfigError, match="flash brings no tokenizer"):
        run(base, tmp_path / "b", "model.path=null", "model.preset=flash")


# --- resume ----------------------------------------------------------------------------------------------------------


def test_resume_is_bit_exact_twice_and_over_epochs(base: Path, tmp_path: Path, whole: Path):
    """8 steps of 4 rows are several epochs; 3 + 2 + 3 steps are the same run."""
    out = tmp_path / "run"
    total = recipe(base, whole).train.steps
    for stop in (3, 5):
        torch.manual_seed(stop)  # whatever the process did before must not matter
        random.seed(stop)
        interrupt_after(base, out, stop)
        assert rows(out)[-1]["step"] == stop
        random.random(), torch.rand(3)
    run(base, out)
    assert_same_state(state_of(out, total), state_of(whole, total))
    assert timeless(out) == timeless(whole)
    assert load_file(out / "final" / "model.safetensors").keys()
    assert_same_state(load_file(out / "final" / "model.safetensors"), load_file(whole / "final" / "model.safetensors"))
    position = json.loads((out / "checkpoints" / "step-8" / "state.json").read_text())["state"]["data_position"]
    assert position["epoch"] >= 2


def interrupt_after(base: Path, out: Path, step: int) -> None:
    """Train in this process and raise SIGINT from the display of `step`."""

    class Interrupting(StringIO):
        def write(self, text: str) -> int:
            if text.startswith(f"step {step}/") and "lr" in text:
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    console = Console(file=Interrupting(), width=200)
    assert run_training(recipe(base, out), console=console) == 130


def test_the_random_state_is_part_of_a_checkpoint(base: Path, tmp_path: Path):
    interrupt_after(base, tmp_path / "a", 2)
    saved = state_of(tmp_path / "a", 2)
    torch.manual_seed(0)
    assert torch.equal(saved["rng/0/torch"], torch.get_rng_state())
    random.seed(0)
    assert tuple(saved["rng/0/python"].tolist()) == random.getstate()[1]


def test_more_steps_go_on_and_fewer_do_not(base: Path, tmp_path: Path):
    out = tmp_path / "run"
    constant = "optim.schedule=constant"
    run(base, out, constant, "train.steps=4")
    first = (out / "final" / "model.safetensors").read_bytes()
    run(base, out, constant, "train.steps=8", "train.keep=1", "train.save_every=0", "model.attention=sdpa")
    assert (out / "final" / "model.safetensors").read_bytes() != first
    assert [row["step"] for row in rows(out) if "loss" in row] == list(range(1, 9))
    run(base, tmp_path / "straight", constant)
    assert_same_state(state_of(out, 8), state_of(tmp_path / "straight", 8))
    with pytest.raises(TrainingError, match="is at step 8, but the recipe ends at step 6"):
        run(base, out, constant, "train.steps=6")


def test_a_recipe_that_no_longer_fits_says_what_changed(base: Path, whole: Path):
    before = (whole / "recipe.yaml").read_bytes()
    with pytest.raises(TrainingError) as error:
        run(base, whole, "optim.lr=0.5", "data.sequence_length=64", "train.keep=7")
    message = str(error.value)
    assert "optim.lr: 0.01 -> 0.5" in message and "data.sequence_length: 48 -> 64" in message
    assert "train.keep" not in message
    assert (whole / "recipe.yaml").read_bytes() == before


def test_changed_data_are_noticed(base: Path, tmp_path: Path):
    data = tmp_path / "train.jsonl"
    data.write_bytes((base / "train.jsonl").read_bytes())
    override = f"data.train.0.path={data}"
    run(base, tmp_path / "run", override, "train.steps=3")
    data.write_text(data.read_text().replace("gate", "sink"))
    with pytest.raises(TrainingError, match="training data are not those of the checkpoint"):
        run(base, tmp_path / "run", override, "train.steps=5")


def test_resume_never_and_from_a_path(base: Path, tmp_path: Path, whole: Path):
    with pytest.raises(ConfigError, match=r"train.resume is never, but .* already holds a run"):
        run(base, whole, "train.resume=never")
    with pytest.raises(ConfigError, match="neither a checkpoint folder"):
        run(base, tmp_path / "x", f"train.resume={tmp_path}")
    for number, start in enumerate((whole / "checkpoints" / "step-6", whole)):
        out = tmp_path / str(number)
        run(base, out, f"train.resume={start}")
        assert_same_state(state_of(out, 8), state_of(whole, 8))
        assert timeless(out) == timeless(whole)
        assert (out / "final" / "model.safetensors").is_file()
    run(base, tmp_path / "fresh", "train.resume=never")
    assert_same_state(state_of(tmp_path / "fresh", 8), state_of(whole, 8))


def test_epochs_end_with_everything_saved(base: Path, tmp_path: Path):
    """The rows of one epoch do not fill the last step; nothing is lost and the schedule ends there."""
    epoch = ("train.steps=null", "train.epochs=1", "train.batch=8")
    printed = run(base, tmp_path / "a", *epoch, "train.save_every=0", "optim.warmup_steps=0")
    steps = [row for row in rows(tmp_path / "a") if "loss" in row]
    per_epoch = int(re.search(r"rows +(\d+) per epoch", printed)[1])
    assert len(steps) == -(-per_epoch // 8) and per_epoch % 8
    targets = sum(row["tokens"] for row in steps)
    assert f"{targets:,} of them targets" in printed
    assert (tmp_path / "a" / "checkpoints" / f"step-{len(steps)}").is_dir()
    assert (tmp_path / "a" / "final" / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"optim.warmup_steps: 90 leaves nothing"):
        run(base, tmp_path / "b", *epoch, "optim.warmup_steps=90")


# --- things that go wrong --------------------------------------------------------------------------------------------


def test_a_diverging_run_stops_and_its_last_checkpoint_is_good(base: Path, tmp_path: Path):
    out = tmp_path / "run"
    with pytest.raises(TrainingError, match=r"step \d+"):
        run(base, out, "optim.lr=1e30", "optim.warmup_steps=0", "optim.clip_norm=null", "train.save_every=1")
    for folder in (out / "checkpoints").glob("step-*"):
        assert all(torch.isfinite(value).all() for value in masters_of(out, int(folder.name[5:])).values())
    assert all(row.get("loss") is None or abs(row["loss"]) < float("inf") for row in rows(out))
    assert not (out / "final").exists()


def test_two_processes_cannot_train_in_one_folder(base: Path, tmp_path: Path):
    from automimo.training.run_folder import RunFolder

    with RunFolder(tmp_path / "run").locked(), pytest.raises(TrainingError, match="another process is training"):
        run(base, tmp_path / "run")
    run(base, tmp_path / "run", "train.steps=3")


def test_an_output_that_is_a_file(base: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output: .* cannot be used as a run folder"):
        run(base, tmp_path / "file")


def test_a_dry_run_prints_the_numbers_and_writes_nothing(base: Path, tmp_path: Path):
    printed = run(base, tmp_path / "a", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    model = MiMoV2FlashForCausalLM.from_pretrained(str(base / "model"))
    total = sum(p.numel() for p in model.parameters())
    # 2 of 4 experts of the two expert layers rest
    active = total - 2 * (3 * 32 * 16) * 2
    sinks = sum(p.numel() for n, p in model.named_parameters() if n.endswith("sink_bias"))
    assert [total, active, total - sinks] == [
        pytest.approx(float(found) * 1e3, rel=5e-3)
        for found in re.findall(r"([\d.]+) k (?:parameters|active|trained)", printed)
    ]
    assert "steps    8 of 4 rows" in printed and "2 micro-batches of 2" in printed
    assert "the beginning" in printed
    with pytest.raises(AutoMiMoError, match=r"optim.groups.0.pattern"):
        run(base, tmp_path / "a", "optim.groups=[{pattern: nothing}]", dry_run=True)
    assert list(tmp_path.iterdir()) == []


# --- kills -----------------------------------------------------------------------------------------------------------

# Saving takes longer here, so that kills land in it; faults of the parent's timing cannot change what is asserted.
CHILD = """
import sys, time
from rich.console import Console
import automimo.training.run as run
from automimo.training import load_recipe
save = run.Saver.save
def slow(saver):
    print("saving", flush=True)
    time.sleep(0.02)
    return save(saver)
run.Saver.save = slow
sys.exit(run.run_training(load_recipe(sys.argv[1]), console=Console(width=200)))
"""


def child(path: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )


def write_recipe(base: Path, tmp_path: Path) -> tuple[Path, Path]:
    from automimo.training import dump_recipe

    out = tmp_path / "run"
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe(base, out, "train.save_every=1")))
    return path, out


def kill_at(process: subprocess.Popen, text: str, delay: float, number: signal.Signals) -> int:
    """Wait for a line that starts with `text`, then a moment, then send the signal; returns the exit code."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(text):
            time.sleep(delay)
            process.send_signal(number)
            break
    process.stdout.read()
    return process.wait(60)


def killed_run_ends_the_same(base: Path, tmp_path: Path, whole: Path, kills: list[tuple[str, float]]) -> None:
    path, out = write_recipe(base, tmp_path)
    ends = [kill_at(child(path), text, delay, signal.SIGKILL) for text, delay in kills]
    # A kill may come after the end of the run, but not all of them.
    assert -signal.SIGKILL in ends and set(ends) <= {-signal.SIGKILL, 0}
    process = child(path)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert_same_state(state_of(out, 8), state_of(whole, 8))
    assert timeless(out) == timeless(whole)
    assert_same_state(load_file(out / "final" / "model.safetensors"), load_file(whole / "final" / "model.safetensors"))
    left = [path.name for path in (out / "checkpoints").iterdir()]
    assert sorted(left) == ["step-7", "step-8"]


def test_killed_and_run_again(base: Path, tmp_path: Path, whole: Path):
    """kill -9 in the middle of a save, after a step, and in the final export; then to the end."""
    killed_run_ends_the_same(
        base, tmp_path, whole, [("saving", 0.022), ("step 6/8  loss", 0.0), ("step 8/8  held", 0.2)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_many_times(base: Path, tmp_path: Path, whole: Path, seed: int):
    rng = random.Random(seed)
    places = ["model", "step 0/8", "saving", "step 2/8", "step 4/8", "step 7/8", "step 8/8"]
    killed_run_ends_the_same(base, tmp_path, whole, [(rng.choice(places), rng.random() * 0.15) for _ in range(6)])


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_the_run_goes_on(base: Path, tmp_path: Path, whole: Path, number: signal.Signals, code: int):
    path, out = write_recipe(base, tmp_path)
    assert kill_at(child(path), "step 2/8  loss", 0.0, number) == code
    (newest,) = [p for p in (out / "checkpoints").iterdir() if p.name == f"step-{rows(out)[-1]['step']}"]
    assert newest.is_dir() and not (out / "final").exists()
    process = child(path)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert_same_state(state_of(out, 8), state_of(whole, 8))
    assert timeless(out) == timeless(whole)


# --- settings that reach the model -----------------------------------------------------------------------------------


def test_the_balance_loss_acts_on_the_router_and_not_on_the_reported_loss(base: Path, tmp_path: Path):
    few = ("train.steps=3", "train.final=none", "moe.bias_update_speed=0.0")
    run(base, tmp_path / "a", *few)
    run(base, tmp_path / "b", *few, "moe.aux_loss=5.0")
    (plain, balanced) = ([row for row in rows(tmp_path / name) if "loss" in row] for name in "ab")
    assert balanced[0]["loss"] == plain[0]["loss"] and balanced[0]["grad_norm"] > plain[0]["grad_norm"]
    assert balanced[2]["loss"] != plain[2]["loss"]


def test_the_window_is_that_of_the_recipe_also_in_the_export(base: Path, tmp_path: Path, whole: Path):
    run(base, tmp_path / "a", "model.window=3", "train.steps=3")
    assert rows(tmp_path / "a")[0]["validation_loss"] != rows(whole)[0]["validation_loss"]
    assert MiMoV2FlashForCausalLM.from_pretrained(str(tmp_path / "a" / "final")).config.sliding_window == 3
