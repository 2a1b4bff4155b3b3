"""Examples of random tokens for tests that count targets."""

import numpy as np

from automimo.data import Example


def ragged_examples(vocabulary: int, count: int, longest: int, seed: int = 0) -> list[Example]:
    """Documents of 2 to `longest` tokens with a random share of targets, the last token always one."""
    rng = np.random.default_rng(seed)
    examples = []
    for number in range(count):
        n = int(rng.integers(2, longest + 1))
        mask = rng.random(n) < rng.random()
        mask[-1] = True
        examples.append(Example(rng.integers(0, vocabulary, n).astype(np.int32), mask, f"doc:{number}"))
    return examples
