"""A ledger of checkpoint keys: each expected key is consumed once, nothing else is.

All faults are collected and reported together, because a checkpoint that does not fit usually differs in hundreds of
keys for one reason, and that reason shows only when the keys stand side by side.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from automimo.errors import CheckpointError

_NUMBER = re.compile(r"(?<=\.)\d{1,18}(?=\.|$)")


class Ledger:
    """Books keys against `expected`, a mapping from key to shape.

    `consume` never raises: it books. `check` raises one CheckpointError with everything that is wrong.
    """

    def __init__(self, expected: Mapping[str, Sequence[int]]) -> None:
        self._expected = {key: tuple(shape) for key, shape in expected.items()}
        self._consumed: set[str] = set()
        self._unexpected: dict[str, None] = {}
        self._doubled: dict[str, None] = {}
        self._wrong_shape: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def consume(self, key: str, shape: Sequence[int]) -> bool:
        """Book `key`. True when it was expected, is new and has the expected shape, so that it may be used."""
        if key not in self._expected:
            self._unexpected[key] = None
            return False
        if key in self._consumed:
            self._doubled[key] = None
            return False
        self._consumed.add(key)
        if tuple(shape) != self._expected[key]:
            self._wrong_shape[key] = (tuple(shape), self._expected[key])
            return False
        return True

    @property
    def missing(self) -> list[str]:
        """Expected keys that were not consumed, in the order of `expected`."""
        return [key for key in self._expected if key not in self._consumed]

    @property
    def unexpected(self) -> list[str]:
        return list(self._unexpected)

    @property
    def doubled(self) -> list[str]:
        return list(self._doubled)

    @property
    def wrong_shape(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Key -> (shape found, shape expected)."""
        return dict(self._wrong_shape)

    def check(self, what: str, remedy: str = "") -> None:
        """Raise a CheckpointError unless every expected key was consumed exactly once and nothing else was.

        `what` starts the message (usually the folder), `remedy` ends it.
        """
        shapes = [
            f"{key}: found {list(found)}, expected {list(expected)}"
            for key, (found, expected) in self._wrong_shape.items()
        ]
        sections = [
            _section("missing", self.missing),
            _section("unexpected", self.unexpected),
            _section("given twice", self.doubled),
            _section("of the wrong shape", shapes),
        ]
        found = [section for section in sections if section]
        if found:
            raise CheckpointError("\n".join([f"{what}: the keys do not fit", *found, *([remedy] if remedy else [])]))


def _section(title: str, lines: Sequence[str], limit: int = 8) -> str:
    if not lines:
        return ""
    groups = group_keys(lines)
    shown = [f"    {group}" for group in groups[:limit]]
    if len(groups) > limit:
        shown.append(f"    ... and {len(groups) - limit} more groups")
    return "\n".join([f"  {len(lines)} {title}:", *shown])


def group_keys(keys: Iterable[str]) -> list[str]:
    """Fold keys that differ only in their numbers: `model.layers.{0..47}.mlp.gate.weight (48)`.

    Each number becomes its range, so a group with holes shows fewer keys in parentheses than the ranges span.
    """
    groups: dict[str, list[tuple[int, ...]]] = {}
    for key in keys:
        numbers = tuple(int(number) for number in _NUMBER.findall(key))
        groups.setdefault(_NUMBER.sub("{}", key.replace("{", "{{").replace("}", "}}")), []).append(numbers)
    result = []
    for pattern, rows in groups.items():
        columns = list(zip(*rows, strict=True))
        spans = [str(low) if (low := min(c)) == (high := max(c)) else f"{{{low}..{high}}}" for c in columns]
        text = pattern.format(*spans)
        result.append(text if len(rows) == 1 else f"{text} ({len(rows)})")
    return result
