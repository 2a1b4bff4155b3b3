"""The verb `inspect` on a recipe: its first samples as the model will see them, and which tokens it learns from."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from automimo.data import Example, SourceReport, colour_loss_mask
from automimo.data.show import SUPERVISED_STYLE
from automimo.training.recipe_file import load_recipe
from automimo.training.run_folder import RunFolder
from automimo.training.setup import load_data, load_fitting_tokenizer, model_folder

# Around what is learned, where there is no colour to show it (a pipe, NO_COLOR).
OPEN, CLOSE = "⟦", "⟧"


def run_inspect(path: Path, samples: int, max_tokens: int, console: Console | None = None) -> int:
    """Print the figures of every training source and the first `samples` documents of the first epoch.

    At most `max_tokens` tokens of each are shown. Green (in plain text: between ⟦ and ⟧) is what the loss is computed
    on; dim is context. Nothing is written. Raises ConfigError for a `path` that is no recipe, and what loading raises.
    """
    console = console or Console(highlight=False)
    recipe = load_recipe(path)
    with model_folder(recipe, RunFolder(recipe.folder), write=False) as folder:
        tokenizer = load_fitting_tokenizer(folder)
        data = load_data(recipe, tokenizer)
    for source in data.train_report.sources:
        _print(console, Text(describe_source(source)))
    pieces = [piece for row in data.train.plan(0).rows for piece in row][:samples]
    for number, (index, start, stop) in enumerate(pieces, start=1):
        whole = data.train.examples[index]
        shown = cut(whole, start, min(stop, start + max_tokens))
        _print(console, Text(f"\nsample {number}  {describe_piece(whole, start, stop)}", style="bold"))
        text = colour_loss_mask(shown, tokenizer)
        _print(console, text if console.color_system and not console.no_color else bracketed(text))
        if stop - start > max_tokens:
            _print(console, Text(f"... {stop - start - max_tokens:,} more tokens (--max-tokens shows more)"))
    return 0


def describe_source(source: SourceReport) -> str:
    """One line of figures of a source."""
    share = source.supervised_tokens / source.tokens
    masked = f", {source.fully_masked:,} without any target left out" if source.fully_masked else ""
    return (
        f"{source.name}: {source.examples:,} examples, {source.tokens:,} tokens, {source.supervised_tokens:,} of them "
        f"learned ({share:.1%}), longest {source.longest:,}{masked}"
    )


def describe_piece(example: Example, start: int, stop: int) -> str:
    """Origin and counts of a document of the plan, which may be a part of an example."""
    part = (
        f", tokens {start:,} to {stop:,} of {len(example.input_ids):,}" if stop - start < len(example.input_ids) else ""
    )
    # The first token of an example is never predicted, so it is no target.
    learned = int(example.target_mask[max(start, 1) : stop].sum())
    return f"{example.origin}{part}: {stop - start:,} tokens, {learned:,} learned"


def cut(example: Example, start: int, stop: int) -> Example:
    """Tokens `start` to `stop` of an example."""
    return replace(example, input_ids=example.input_ids[start:stop], target_mask=example.target_mask[start:stop])


def bracketed(text: Text) -> Text:
    """The same text with the learned stretches between brackets instead of in colour."""
    plain = text.plain
    for span in sorted(text.spans, key=lambda span: span.start, reverse=True):
        if span.style == SUPERVISED_STYLE:
            plain = f"{plain[: span.start]}{OPEN}{plain[span.start : span.end]}{CLOSE}{plain[span.end :]}"
    return Text(plain)


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)
