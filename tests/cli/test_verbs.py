"""Every verb does its work for real, and fails with one message."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from automimo import MiMoV2FlashForCausalLM, Sampling, load_chat

from .conftest import Completed, check_readable_failure, run_cli

Call = Callable[..., Completed]


def test_init_makes_a_complete_folder(tiny_model: Path) -> None:
    names = {path.name for path in tiny_model.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    config = json.loads((tiny_model / "config.json").read_text())
    chat = load_chat(tiny_model)
    assert config["eos_token_id"] == chat.tokenizer.eos_token_id
    assert set(chat.stop_ids) >= set(chat.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    assert all(torch.isfinite(p).all() for p in chat.model.parameters())


def test_init_refuses(tiny_model: Path, tmp_path: Path, call: Call) -> None:
    before = sorted(path.name for path in tiny_model.iterdir())
    check_readable_failure(call("init", tiny_model, "--preset", "tiny"), "not an empty folder", str(tiny_model))
    assert sorted(path.name for path in tiny_model.iterdir()) == before
    check_readable_failure(call("init", tmp_path / "x", "--preset", "huge"), "'huge' is unknown", "tiny", "flash")
    done = call("init", tmp_path / "x", "--preset", "tiny", "--tokenizer", tmp_path / "none")
    check_readable_failure(done, "no such folder")
    assert list(tmp_path.iterdir()) == []


def test_train_writes_a_run_folder(tiny_run: Path) -> None:
    names = {path.name for path in tiny_run.iterdir()}
    assert {"recipe.yaml", "metrics.jsonl", "loss.png", "checkpoints", "final"} <= names
    rows = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 1, 2]
    assert {"loss", "grad_norm", "lr", "tokens", "tokens_per_second", "seconds"} <= set(rows[-2]) | set(rows[-1])
    card = (tiny_run / "final" / "README.md").read_text()
    assert "| steps | 2 of 2 rows, 128 tokens each |" in card
    assert (tiny_run / "final" / "tokenizer.json").is_file()


def test_train_again_does_nothing_more(tiny_recipe: Path, tiny_run: Path, call: Call) -> None:
    weights = (tiny_run / "final" / "model.safetensors").read_bytes()
    done = call("train", tiny_recipe, f"output={tiny_run}")
    assert done.returncode == 0, done.stderr
    assert (tiny_run / "final" / "model.safetensors").read_bytes() == weights
    assert "\x1b" not in done.stdout


def test_train_takes_overrides_and_dry_runs(tiny_recipe: Path, tmp_path: Path, call: Call) -> None:
    output = tmp_path / "dry"
    done = call("train", tiny_recipe, f"output={output}", "train.steps=7", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "7 of 2 rows" in done.stdout
    assert not output.exists()


def test_a_dry_run_checks_the_layout_of_the_processes_it_is_told(tiny_recipe: Path, tmp_path: Path, call: Call) -> None:
    train = ("train", tiny_recipe, f"output={tmp_path / 'dry'}", "--dry-run")
    done = call(*train, "parallel.context=2")
    assert done.returncode == 0, done.stderr
    assert "layout   not checked: how many processes is not known; add --nproc N" in done.stdout
    done = call(*train, "--nproc", "4", "parallel.context=2")
    assert "ranks    4: 1 copy of the model in 4 shards" in done.stdout
    assert "2 ranks share the tokens of a row" in done.stdout and "GiB per rank" in done.stdout
    check_readable_failure(call(*train, "parallel.context=7"), "over 7 ranks", "query and key/value head counts")
    check_readable_failure(call(*train, "--nproc", "3", "parallel.context=2"), "3 processes", "parallel.context 2")
    assert not (tmp_path / "dry").exists()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["optim.warmup=1"], ["optim.warmup", "unknown key", "did you mean optim.warmup_steps?"]),
        (["optim.lr=fast", "train.batch=0"], ["2 problems", "optim.lr", "train.batch"]),
        (["optim.lr"], ["key=value"]),
        (["model.attention=flex"], ["flex"]),
        (["train.resume=never"], ["already holds a run", "another output"]),
        (["optim.lr=0.5"], ["no longer fits the checkpoint", "optim.lr: 0.001 -> 0.5"]),
    ],
)
def test_train_explains_what_is_wrong(
    overrides: list[str], parts: list[str], tiny_recipe: Path, tiny_run: Path, call: Call
) -> None:
    before = (tiny_run / "metrics.jsonl").read_bytes()
    check_readable_failure(call("train", tiny_recipe, f"output={tiny_run}", *overrides), *parts)
    assert (tiny_run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.train.0.path=missing.jsonl", ["missing.jsonl", "no such file"]),
        ("model.path=missing-model", ["missing-model", "no such folder"]),
    ],
)
def test_train_names_missing_files(
    override: str, parts: list[str], tiny_recipe: Path, tmp_path: Path, call: Call
) -> None:
    check_readable_failure(call("train", tiny_recipe, f"output={tmp_path / 'run'}", override), *parts)


def test_train_names_a_missing_recipe(tmp_path: Path) -> None:
    check_readable_failure(run_cli("train", tmp_path / "none.yaml"), "no such recipe file", "none.yaml")


def test_train_saves_on_sigterm_and_goes_on(tiny_recipe: Path, tmp_path: Path, call: Call) -> None:
    output = tmp_path / "run"
    overrides = [f"output={output}", "train.evaluate_every=0"]
    command = [sys.executable, "-m", "automimo", "train", str(tiny_recipe), *overrides, "train.steps=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        metrics = output / "metrics.jsonl"
        deadline = time.monotonic() + 150
        while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 143, err
    assert "saved" in out
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert (output / "checkpoints" / f"step-{steps[-1]}").is_dir()
    done = call("train", tiny_recipe, *overrides, f"train.steps={steps[-1] + 1}")
    assert done.returncode == 0, done.stderr
    # A resumed run exports everything that an undisturbed one does.
    assert {"tokenizer.json", "generation_config.json"} <= {path.name for path in (output / "final").iterdir()}
    assert f"step-{steps[-1]}" in done.stdout


def test_generate_prints_exactly_the_answer(tiny_run: Path) -> None:
    final = tiny_run / "final"
    done = run_cli("generate", final, "--prompt", "Explain é and 中.", "--max-new-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    chat = load_chat(final)
    expected = chat.answer(
        [{"role": "user", "content": "Explain é and 中."}], Sampling(max_new_tokens=12), thinking=False
    )
    assert done.stdout == expected + "\n"


def test_generate_samples_by_seed(tiny_run: Path, call: Call) -> None:
    def answer(*options: str) -> str:
        done = call("generate", tiny_run / "final", "--prompt", "Hi", "--max-new-tokens", "8", *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    hot = ("--temperature", "1.5", "--top-p", "0.95", "--top-k", "500")
    assert answer(*hot, "--seed", "3") == answer(*hot, "--seed", "3")
    assert len({answer(*hot, "--seed", str(seed)) for seed in range(3)}) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--top-p", "1.5"], "top_p must be above 0"),
    ],
)
def test_generate_refuses_bad_sampling(options: list[str], message: str, tiny_model: Path, call: Call) -> None:
    check_readable_failure(call("generate", tiny_model, "--prompt", "Hi", *options), message)


def test_generate_names_a_folder_that_is_no_model(tmp_path: Path, call: Call) -> None:
    check_readable_failure(call("generate", tmp_path / "nope", "--prompt", "Hi"), "no such folder", "nope")
    check_readable_failure(call("generate", tmp_path, "--prompt", "Hi"), str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", None, "has no chat template"),
        ("chat_template.jinja", "{{ x", "chat template of the tokenizer failed"),
        ("chat_template.jinja", '{{ raise_exception("no") }}', "chat template of the tokenizer failed: no"),
        ("generation_config.json", "{", "generation_config.json: cannot be read as JSON"),
        ("generation_config.json", "[]", "generation_config.json: must hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id must be a token id"),
    ],
)
def test_generate_names_a_broken_side_file(
    name: str, content: str | None, message: str, tiny_model: Path, tmp_path: Path, call: Call
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    done = call("generate", folder, "--prompt", "Hi", "--max-new-tokens", "1")
    check_readable_failure(done, message)
    assert done.stderr.startswith("error: ")


def test_generate_refuses_a_prompt_that_is_no_text(tiny_model: Path, call: Call) -> None:
    """What Python makes of the byte 0xff on a command line."""
    done = call("generate", tiny_model, "--prompt", "\udcff", "--max-new-tokens", "1")
    check_readable_failure(done, "error: the prompt is not UTF-8 text")


def test_generate_with_a_closed_stdout_still_works(tiny_model: Path) -> None:
    command = '"$0" -m automimo generate "$1" --prompt Hi --max-new-tokens 1 >&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, tiny_model], capture_output=True, timeout=170, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_run_that_never_began_leaves_no_folder(tiny_recipe: Path, tmp_path: Path, call: Call) -> None:
    done = call("train", tiny_recipe, f"output={tmp_path / 'run'}", f"data.train.0.path={tmp_path / 'none.jsonl'}")
    check_readable_failure(done, "none.jsonl: no such file")
    assert list(tmp_path.iterdir()) == []


def test_evaluate_agrees_with_a_plain_loop(tiny_run: Path, chats: Path, call: Call) -> None:
    """Reference: one document at a time, full logits, torch's own cross entropy, masks by string search."""
    final = tiny_run / "final"
    done = call("evaluate", final, "--data", chats)
    assert done.returncode == 0, done.stderr
    figures = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    chat = load_chat(final, dtype=torch.float32)
    total, count = 0.0, 0
    for line in chats.read_text().splitlines():
        messages = json.loads(line)["messages"]
        text = chat.tokenizer.apply_chat_template(messages, tokenize=False)
        answer = f"{messages[1]['content']}<|im_end|>"
        assert text.endswith(answer)
        prompt = chat.tokenizer(text.removesuffix(answer), add_special_tokens=False)["input_ids"]
        learned = chat.tokenizer(answer, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt + learned])
        with torch.no_grad():
            logits = chat.model(ids).logits[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(learned), reduction="sum"))
        count += len(learned)
    assert int(figures["targets"]) == count
    assert float(figures["loss"].split()[0]) == pytest.approx(total / count, abs=6e-5)  # printed with 4 digits
    assert int(figures["examples"]) == 3


def test_evaluate_explains_what_is_wrong(tiny_model: Path, tmp_path: Path, call: Call) -> None:
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"question": 1}\n')
    check_readable_failure(call("evaluate", tiny_model, "--data", odd), "neither", "--kind")
    check_readable_failure(call("evaluate", tiny_model, "--data", odd, "--kind", "sound"), "sound", "chat, text, hf")
    check_readable_failure(call("evaluate", tiny_model, "--data", odd, "--kind", "chat"), "odd.jsonl:1")
    check_readable_failure(call("evaluate", tiny_model, "--data", tmp_path / "none.jsonl"), "none.jsonl")


def test_inspect_shows_what_is_learned(tiny_recipe: Path) -> None:
    done = run_cli("inspect", tiny_recipe, "--samples", "3")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "3 examples" in done.stdout
    for answer in ("42.", "It is 48, I think.", "A pear."):
        assert f"<think></think>⟦{answer}<|im_end|>⟧" in done.stdout
    assert done.stdout.count("⟦") == 3


def test_inspect_cuts_long_samples(tiny_recipe: Path, call: Call) -> None:
    done = call("inspect", tiny_recipe, "--samples", "1", "--max-tokens", "10")
    assert done.returncode == 0, done.stderr
    assert "more tokens (--max-tokens shows more)" in done.stdout
    assert "sample 2" not in done.stdout


def test_inspect_says_what_a_folder_is(tiny_model: Path, tmp_path: Path, call: Call) -> None:
    done = run_cli("inspect", tiny_model)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "attention     split (q_proj, k_proj, v_proj)\n" in done.stdout
    assert done.stdout.endswith("no problems\n")
    # A folder with problems is reported in full on stdout; only the exit code tells.
    done = call("inspect", tiny_model, "--source-tp", "2", "--flash-v-scales", "own")
    assert done.returncode == 1
    assert "source layout: said to be fused, but there is no qkv_proj" in done.stdout
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    (broken / "config.json").unlink()
    check_readable_failure(call("inspect", broken), "has no config.json", str(broken))


def test_inspect_refuses_what_is_neither_recipe_nor_checkpoint(tmp_path: Path, call: Call) -> None:
    check_readable_failure(call("inspect", tmp_path / "none.yaml"), "no such recipe file")
    check_readable_failure(call("inspect", tmp_path / "none"), "no such folder", "Hub id")


def test_report_draws_the_picture_again(tiny_run: Path) -> None:
    (tiny_run / "loss.png").unlink()
    done = run_cli("report", tiny_run)
    assert done.returncode == 0, done.stderr
    assert (tiny_run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "| target tokens |" in done.stdout
    assert f"picture: {tiny_run / 'loss.png'}" in done.stdout


def test_report_needs_a_run(tiny_model: Path, tmp_path: Path, call: Call) -> None:
    check_readable_failure(call("report", tmp_path / "none"), "no such run folder")
    check_readable_failure(call("report", tiny_model), "metrics.jsonl", "not a run folder")


def test_doctor_passes_here() -> None:
    done = run_cli("doctor", env={"COLUMNS": "60"})
    assert done.returncode == 0, done.stdout
    assert "\x1b" not in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 60


def test_transformers_reads_the_result_and_agrees(tiny_run: Path) -> None:
    command = [sys.executable, "-m", "automimo.compare", str(tiny_run / "final"), "--tokens", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("largest logit difference to transformers: ")
    assert "below 1e-04; 300 tokens x 4,096 logits" in done.stdout


def test_compare_notices_another_function(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from automimo import compare

    def load_wrong(folder: str, dtype: torch.dtype) -> MiMoV2FlashForCausalLM:
        return MiMoV2FlashForCausalLM.from_pretrained(folder, dtype=dtype, sliding_window=63)

    monkeypatch.setattr(compare, "load_model", load_wrong)
    assert compare.main([str(tiny_run / "final")]) == 1
    assert "NOT below" in capsys.readouterr().out


def test_compare_names_a_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from automimo import compare

    assert compare.main([str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
