"""The verb `inspect`: learned text in colour on a terminal, between brackets elsewhere."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from automimo.data import Example
from automimo.data.show import PROMPT_STYLE, SUPERVISED_STYLE
from automimo.init_model import init_model
from automimo.inspect_recipe import bracketed, cut, describe_piece, run_inspect
from automimo.mimo_v2_flash.tokenizer import build_tokenizer, save_tokenizer


def test_brackets_stand_around_every_learned_stretch() -> None:
    text = Text()
    for part, learned in (("ask [a] ", False), ("answer", True), (" ask", False), ("⟦b⟧", True)):
        text.append(part, style=SUPERVISED_STYLE if learned else PROMPT_STYLE)
    assert bracketed(text).plain == "ask [a] ⟦answer⟧ ask⟦⟦b⟧⟧"
    assert bracketed(Text("nothing learned", style=PROMPT_STYLE)).plain == "nothing learned"


def test_counts_of_a_piece_are_those_of_the_loss() -> None:
    """An example's first token is never a target; the first token of a later piece is one of the piece before it."""
    example = Example(np.arange(10, dtype=np.int32), np.array([1, 1, 0, 0, 1, 1, 1, 0, 1, 1], np.bool_), "a.jsonl:3")
    assert describe_piece(example, 0, 10) == "a.jsonl:3: 10 tokens, 6 learned"
    assert describe_piece(example, 4, 8) == "a.jsonl:3, tokens 4 to 8 of 10: 4 tokens, 3 learned"
    part = cut(example, 4, 8)
    assert part.input_ids.tolist() == [4, 5, 6, 7]
    assert part.target_mask.tolist() == [True, True, True, False]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"[bold]{n}[/bold]"}]}
        for n in range(4)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tokenizer").mkdir()
    texts = ["the assistant is a helpful system", "say what the user said", "assistant and user"]
    save_tokenizer(build_tokenizer(texts, 310), folder / "tokenizer")
    init_model(folder / "model", "tiny", tokenizer_folder=folder / "tokenizer")
    (folder / "r.yaml").write_text(
        f"output: {folder}/run\nmodel: {{path: {folder}/model}}\n"
        f"data:\n  train: [{{kind: chat, path: {folder}/chats.jsonl}}]\n  sequence_length: 512\n"
        "train: {steps: 1, batch: 1}\n"
    )
    return folder / "r.yaml"


@pytest.mark.parametrize("colour", [True, False])
def test_samples_are_shown_with_their_mask(recipe: Path, colour: bool) -> None:
    out = io.StringIO()
    system = "truecolor" if colour else None
    console = Console(file=out, force_terminal=colour, color_system=system, width=60, highlight=False)
    assert run_inspect(recipe, 2, 400, console) == 0
    text = out.getvalue()
    assert text.count("<|im_start|>system") == 2, "two samples, once each"
    learned = ("\x1b[32m", "\x1b[0m") if colour else ("⟦", "⟧")
    # Markup of the console language in a message is text.
    assert any(f"{learned[0]}[bold]{n}[/bold]<|im_end|>{learned[1]}" in text for n in range(4))
    assert ("\x1b" in text) == colour
    assert not (recipe.parent / "run").exists()


def test_a_terminal_without_colour_gets_brackets(recipe: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", no_color=True, width=200)
    run_inspect(recipe, 1, 400, console)
    assert out.getvalue().count("⟦") == 1


def test_the_shown_samples_are_the_first_of_the_first_epoch(recipe: Path) -> None:
    from automimo.training.recipe_file import load_recipe
    from automimo.training.setup import load_data, load_fitting_tokenizer

    data = load_data(load_recipe(recipe), load_fitting_tokenizer(recipe.parent / "model"))
    first = data.train.batch(data.train.next_rows(1)).origins
    out = io.StringIO()
    run_inspect(recipe, 4, 400, Console(file=out, width=200))
    shown = [
        line.split("  ")[1].partition(": ")[0] for line in out.getvalue().splitlines() if line.startswith("sample")
    ]
    assert tuple(shown) == first[:4]
