"""`python -m automimo.compare FOLDER`: a model folder read by AutoMiMo and by transformers, logits against logits.

transformers has a MiMo-V2-Flash class of its own, written by others. It reads the same files, so equal logits mean that
the export is complete and that both compute the same function. Exit code 0 when the largest difference in fp32 is below
the limit, 1 otherwise.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MiMoV2FlashForCausalLM as TransformersModel
from transformers.utils.logging import disable_progress_bar

from automimo.cli_errors import exit_code_of
from automimo.errors import CheckpointError
from automimo.generate import load_model

MODEL_TYPE = "mimo_v2_flash"
LIMIT = 1e-4


@dataclass(frozen=True)
class Comparison:
    """Largest absolute logit difference over `tokens` positions, largest logit, and share of equal arg-maxima."""

    difference: float
    largest_logit: float
    agreement: float
    tokens: int
    vocabulary: int


@torch.no_grad()
def compare(folder: str | Path, *, tokens: int = 512, seed: int = 0) -> Comparison:
    """Run both models in fp32 on one row of `tokens` random ids (longer than the window of the tiny presets).

    Raises CheckpointError when transformers cannot open the folder or does not find every weight in it.
    """
    ours = load_model(folder, dtype=torch.float32)
    if ours.config.model_type != MODEL_TYPE:
        raise CheckpointError(
            f"{folder}: its model type is {ours.config.model_type}; transformers itself knows only {MODEL_TYPE}"
        )
    theirs = _open_with_transformers(folder)
    vocabulary = ours.config.vocab_size
    ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))
    left = ours.eval()(ids).logits
    right = theirs.eval()(ids, use_cache=False).logits
    return Comparison(
        difference=float((left - right).abs().max()),
        largest_logit=float(right.abs().max()),
        agreement=float((left.argmax(-1) == right.argmax(-1)).float().mean()),
        tokens=tokens,
        vocabulary=vocabulary,
    )


def _open_with_transformers(folder: str | Path) -> TransformersModel:
    disable_progress_bar()
    try:
        opened: Any = TransformersModel.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: transformers cannot open it: {error}") from error
    model, loading = opened
    wrong = {kind: sorted(map(str, keys)) for kind, keys in loading.items() if keys}
    if wrong:
        raise CheckpointError(f"{folder}: transformers does not find its weights: {wrong}")
    return model


def run_compare(folder: str, tokens: int) -> int:
    """Print the comparison; 0 when it is below the limit, else 1."""
    result = compare(folder, tokens=tokens)
    passed = result.difference < LIMIT  # False for NaN
    print(
        f"largest logit difference to transformers: {result.difference:.1e} "
        f"({'below' if passed else 'NOT below'} {LIMIT:.0e}; {result.tokens:,} tokens x {result.vocabulary:,} logits "
        f"up to {result.largest_logit:.1f}; same most likely token at {result.agreement:.2%})"
    )
    return 0 if passed else 1


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `python -m automimo.compare`."""
    parser = argparse.ArgumentParser(prog="python -m automimo.compare", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", metavar="FOLDER", help="model folder (MiMo-V2-Flash)")
    parser.add_argument("--tokens", type=int, default=512, help="length of the input (default 512)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    given = parser.parse_args(arguments)
    return exit_code_of(lambda: run_compare(given.folder, given.tokens), debug=given.debug)


if __name__ == "__main__":
    sys.exit(main())
