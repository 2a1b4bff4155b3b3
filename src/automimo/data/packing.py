"""The packing plan of an epoch: which piece of which example lies in which row. No tokens are touched here.

A row holds whole documents (pieces) and at most `sequence_length` tokens. Documents never see each other, so a plan
decides only how full the rows are, never what is trained on. Everything follows from (lengths, seed, epoch) through
integer arithmetic of our own, so a resumed run meets the same rows under any version of any library.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from automimo.errors import DataError

Overflow = Literal["error", "drop", "split"]


class Piece(NamedTuple):
    """Tokens `start` to `stop` (excluded) of example number `example`; one document of a row."""

    example: int
    start: int
    stop: int


@dataclass(frozen=True)
class PackingPlan:
    """Rows of one epoch.

    rows: the pieces of each row, in the order in which the epoch shows them.
    sequence_length: most tokens of a row.
    efficiency: tokens / (rows * sequence_length), 1.0 = no waste; 0.0 without rows.
    tokens: tokens in all rows.
    dropped: examples left out because they are too long (`overflow="drop"`).
    dropped_tokens: their tokens.
    split_count: examples that were cut into several pieces (`overflow="split"`).
    idle_pieces: pieces of cut examples left out because they hold no target.
    idle_tokens: their tokens.
    """

    rows: list[list[Piece]]
    sequence_length: int
    efficiency: float
    tokens: int
    dropped: int
    dropped_tokens: int
    split_count: int
    idle_pieces: int
    idle_tokens: int


def shuffled(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n), int64, that depends on `key` (integers) alone.

    Sorts by SplitMix64 (Steele, Lea, Flood 2014) of the index, started at a state mixed from the key. Own arithmetic
    because numpy does not promise the streams of its generators from one version to the next.
    """
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mix(state ^ np.uint64(part % 2**64))
    return np.argsort(_mix(state + np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)), kind="stable")


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's step and output function on uint64 arrays, which wrap around."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def plan_epoch(
    lengths: Sequence[int] | np.ndarray,
    *,
    sequence_length: int,
    overflow: Overflow = "error",
    packing: bool = True,
    seed: int = 0,
    epoch: int = 0,
    has_target: Callable[[Piece], bool] | None = None,
    name: Callable[[int], str] | None = None,
) -> PackingPlan:
    """Plan the rows of an epoch over examples of the given lengths (tokens), in O(n log n).

    packing: first-fit-decreasing over the pieces, ties in an order drawn from (seed, epoch); without it every piece
    has a row of its own. The rows are then shuffled by (seed, epoch).

    overflow, for an example longer than `sequence_length`: `error` refuses the data; `drop` leaves the whole example
    out and counts it; `split` cuts it into pieces of `sequence_length` tokens and a rest, each a document of its own.
    Every token of every example that is not dropped is in exactly one piece; only a piece of a cut example for which
    `has_target` is false is left out (a long prompt whose answer lies in a later piece), and counted.

    name: example number -> where it comes from, for the error. Raises DataError (overflow) and ValueError (arguments).
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
    if overflow not in ("error", "drop", "split"):
        raise ValueError(f"overflow must be error, drop or split, not {overflow!r}")
    if lengths.size and lengths.min() < 1:
        raise ValueError(f"example {int(lengths.argmin())} has no tokens")
    over = np.flatnonzero(lengths > sequence_length)
    if overflow == "error" and over.size:
        raise DataError(_overflow_message(lengths, over, sequence_length, name))

    whole = np.flatnonzero(lengths <= sequence_length)
    pieces = [Piece(i, 0, n) for i, n in zip(whole.tolist(), lengths[whole].tolist(), strict=True)]
    idle: list[Piece] = []
    if overflow == "split":
        cut = [piece for i in over.tolist() for piece in _cut(i, int(lengths[i]), sequence_length)]
        idle = [piece for piece in cut if has_target is not None and not has_target(piece)]
        pieces += [piece for piece in cut if has_target is None or has_target(piece)]
    sizes = np.fromiter((stop - start for _, start, stop in pieces), np.int64, len(pieces))

    ties = shuffled(len(pieces), seed, epoch, 1)
    order = ties[np.argsort(-sizes[ties], kind="stable")]
    places = _first_fit(sizes[order].tolist(), sequence_length) if packing else list(range(len(pieces)))
    rows: list[list[Piece]] = [[] for _ in range(max(places, default=-1) + 1)]
    for index, place in zip(order.tolist(), places, strict=True):
        rows[place].append(pieces[index])

    tokens = int(sizes.sum())
    dropped = over if overflow == "drop" else over[:0]
    return PackingPlan(
        rows=[rows[i] for i in shuffled(len(rows), seed, epoch, 2).tolist()],
        sequence_length=sequence_length,
        efficiency=tokens / (len(rows) * sequence_length) if rows else 0.0,
        tokens=tokens,
        dropped=int(dropped.size),
        dropped_tokens=int(lengths[dropped].sum()),
        split_count=int(over.size) if overflow == "split" else 0,
        idle_pieces=len(idle),
        idle_tokens=sum(stop - start for _, start, stop in idle),
    )


def _overflow_message(
    lengths: np.ndarray, over: np.ndarray, sequence_length: int, name: Callable[[int], str] | None
) -> str:
    first, longest = int(over[0]), int(over[lengths[over].argmax()])

    def label(i: int) -> str:
        return f"example {i}" if name is None else f"example {i} ({name(i)})"

    return (
        f"{label(first)} has {lengths[first]} tokens, but data.sequence_length is {sequence_length}. "
        f"{over.size} of {lengths.size} examples are too long; the longest is {label(longest)} with "
        f"{lengths[longest]}. Raise data.sequence_length, or set data.overflow to drop (leave them out) or split "
        "(cut them)"
    )


def _cut(example: int, length: int, sequence_length: int) -> list[Piece]:
    return [Piece(example, start, min(start + sequence_length, length)) for start in range(0, length, sequence_length)]


def _first_fit(sizes: list[int], capacity: int) -> list[int]:
    """Bin of each item, the first bin (by number) with room for it; a maximum tree over the room left finds it.

    n items need at most n bins, all of which are there, empty, from the start: so there is always a place.
    """
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    places = []
    for size in sizes:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        places.append(node - leaves)
        left = room[node] - size
        room[node] = left
        while node > 1:
            sibling = room[node ^ 1]
            best = left if left > sibling else sibling
            node >>= 1
            if room[node] == best:
                break
            room[node] = left = best
    return places
