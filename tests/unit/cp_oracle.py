"""Packed rows and their cut among context-parallel ranks, token by token in plain Python lists.

Written from the text of the rule: every padded document is cut into 2 * R equal chunks, rank r of R owns chunk r and
chunk 2 * R - 1 - r, in this order, document by document.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

FILLER = -1000
PAD = 3  # is content as well, so that nothing can be read off from values


@dataclass(frozen=True)
class FakeMesh:
    """What the code asks of a DeviceMesh of one dimension."""

    ranks: int
    rank: int = 0
    group: object = None
    device_type: str = "cpu"

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank

    def get_group(self) -> object:
        return self.group


class NamedMesh(FakeMesh):
    """A mesh whose only dimension is named cp."""

    mesh_dim_names = ("cp",)
    ndim = 1


def owner_of(place: int, length: int, ranks: int) -> int:
    """Rank of the token at `place` of a document with `length` places."""
    for rank in range(ranks):
        for chunk in (rank, 2 * ranks - 1 - rank):
            if chunk * length <= place * 2 * ranks < (chunk + 1) * length:
                return rank
    raise AssertionError(f"nobody owns place {place} of {length}")


def share_of(lengths: list[int], ranks: int, rank: int) -> list[int]:
    """Places in the stream of the tokens of `rank`. Its first chunk of a document is the earlier one."""
    places, start = [], 0
    for length in lengths:
        places += [start + place for place in range(length) if owner_of(place, length, ranks) == rank]
        start += length
    return places


@dataclass(frozen=True)
class Rows:
    """Documents of each row as (tokens, places)."""

    documents: list[list[tuple[int, int]]]

    @property
    def length(self) -> int:
        return sum(places for _, places in self.documents[0])

    def stream(self, key: str, chunk: int, chunks: int) -> list[Any]:
        """The values of one chunk: every real token has values that no other one has."""
        per = len(self.documents) // chunks
        values: list[Any] = []
        for row in range(chunk * per, (chunk + 1) * per):
            for number, (real, places) in enumerate(self.documents[row]):
                for place in range(places):
                    token = 1000 * row + 100 * number + place
                    is_real = place < real
                    values.append(
                        {
                            "input_ids": (PAD if token % 5 == 0 else 10 + token) if is_real else PAD,
                            "labels": 50_000 + token if is_real else -100,
                            "position_ids": place,
                            "padding_mask": not is_real,
                        }[key]
                    )
        return values

    def places(self, chunk: int, chunks: int) -> list[int]:
        per = len(self.documents) // chunks
        return [places for row in self.documents[chunk * per : (chunk + 1) * per] for _, places in row]

    def tokens(self, chunk: int, chunks: int) -> list[int]:
        per = len(self.documents) // chunks
        return [real for row in self.documents[chunk * per : (chunk + 1) * per] for real, _ in row]

    def table(self, key: str) -> Tensor:
        return torch.tensor(self.stream(key, 0, 1)).view(len(self.documents), -1)

    def batch(self, **extra: Any) -> dict[str, Any]:
        most = max(map(len, self.documents))

        def lengths(which: int) -> Tensor:
            return torch.tensor([[d[which] for d in row] + [FILLER] * (most - len(row)) for row in self.documents])

        return {
            "input_ids": self.table("input_ids"),
            "labels": self.table("labels"),
            "position_ids": self.table("position_ids"),
            "seq_lens": lengths(0),
            "seq_lens_padded": lengths(1),
            "qkv_format": "thd",
            **extra,
        }


@st.composite
def packed_rows(draw: st.DrawFn, ranks: int, chunks: int = 1) -> Rows:
    """Ragged rows: 1 to 3 for each chunk, documents of 0 real tokens up to all their places."""
    unit = 1 if ranks == 1 else 2 * ranks
    units = draw(st.integers(1, 6))
    documents = []
    for _ in range(chunks * draw(st.integers(1, 3))):
        left, row = units, []
        while left:
            part = draw(st.integers(1, left))
            row.append((draw(st.integers(0, part * unit)), part * unit))
            left -= part
        documents.append(row)
    return Rows(documents)


ROWS = Rows([[(5, 8), (16, 16)], [(1, 8), (8, 8), (3, 8)], [(24, 24)], [(23, 24)]])  # fits 1, 2 and 4 ranks
