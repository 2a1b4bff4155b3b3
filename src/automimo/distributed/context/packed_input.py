"""The two forms in which a packed batch comes: rows that list the lengths of their documents, or one stream.

Everything is derived from the lengths of documents. A row lists the real and the padded length of each document: its
tokens come first in its places, and the places fill the row. What is padding is known from that alone, so a padding id
that is also content (an end-of-sequence token, say) is not taken for padding.

Legend: B rows, S places of a row, N chunks, T places of a chunk's stream (B * S / N), D documents, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from automimo.errors import ConfigError

NO_LABEL = -100
# [B, S] or, for embeddings, [B, S, H]; position_ids are handled apart, since mRoPE puts an axis in front.
_TOKEN_KEYS = ("input_ids", "inputs_embeds", "labels", "targets")
CONSUMED = frozenset(
    {
        *_TOKEN_KEYS,
        *("position_ids", "padding_mask", "seq_lens", "seq_lens_padded", "qkv_format"),
        *("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "cp_size", "cp_rank"),
    }
)


@dataclass(frozen=True)
class PackedStream:
    """Documents of one chunk: tokens of each, and places that it takes up in the stream."""

    lengths: list[int]
    padded: list[int]

    def boundaries(self) -> list[int]:
        """Those of the places, 0 first."""
        return cumulative(self.padded)

    def within(self) -> Tensor:
        """int64 [T]: how far each place is from the start of its document."""
        padded = torch.tensor(self.padded)
        starts = padded.cumsum(0) - padded
        return torch.arange(sum(self.padded)) - starts.repeat_interleave(padded)

    def padding(self) -> Tensor:
        """bool [T], True behind the tokens of each document."""
        return self.within() >= torch.tensor(self.lengths).repeat_interleave(torch.tensor(self.padded))

    def tail_absorbed(self) -> "PackedStream":
        """Padding that only follows the last token of the stream counts as tokens of the last document."""
        return PackedStream(self.padded, self.padded) if self.lengths[:-1] == self.padded[:-1] else self


def read_packed(
    batch: Mapping[str, Any], chunks: int, filler: int, padding_id: int
) -> tuple[dict[str, Tensor], list[PackedStream]]:
    """Token tensors as [N, T, ...] (mRoPE positions [N, T, n]), with `padding_mask` and `position_ids`, and the
    documents of the N streams. Raises KeyError and ConfigError as `make_cp_batch_for_te`."""
    tokens = _tokens_of(batch)
    # A stream is [T], or [1, T] where boundaries say that it is one.
    dims = (2 if "cu_seqlens" in batch else 1) + int(tokens.is_floating_point())
    if "seq_lens" in batch or "seq_lens_padded" in batch or tokens.dim() > dims:
        return _flattened_rows(batch, chunks, filler)
    return _given_stream(batch, chunks, padding_id)


def row_lengths(lengths_BD: Tensor, name: str, filler: int) -> list[list[int]]:
    """The lengths of each row without the fillers. Raises ConfigError unless `lengths_BD` has two dimensions."""
    if lengths_BD.dim() != 2:
        raise ConfigError(f"{name} must be [rows, documents], got shape {list(lengths_BD.shape)}")
    return [[length for length in row if length != filler] for row in lengths_BD.tolist()]


def _tokens_of(batch: Mapping[str, Any]) -> Tensor:
    tokens = batch.get("input_ids")
    tokens = batch.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        raise KeyError("the batch has neither input_ids nor inputs_embeds")
    return tokens


def _flattened_rows(batch: Mapping[str, Any], chunks: int, filler: int) -> tuple[dict[str, Tensor], list[PackedStream]]:
    """Token tensors as [N, T, ...] and the documents of the N streams."""
    for key in ("seq_lens", "seq_lens_padded"):
        if batch.get(key) is None:
            raise KeyError(f"{key} is missing: a packed batch lists the lengths of the documents of every row")
    first = _tokens_of(batch)
    if first.dim() != 2 + int(first.is_floating_point()):
        raise ConfigError(f"the tokens of packed rows must be [B, S] or, embedded, [B, S, H]; got {list(first.shape)}")
    rows, length = first.shape[:2]
    if rows % chunks:
        raise ConfigError(f"{rows} rows cannot be divided among num_chunks {chunks}")
    documents = _documents_of_rows(batch, rows, length, filler)
    per = rows // chunks
    streams = [
        PackedStream(
            [n for row in documents[i : i + per] for n in row.lengths],
            [n for row in documents[i : i + per] for n in row.padded],
        )
        for i in range(0, rows, per)
    ]
    tokens = {}
    for key in _TOKEN_KEYS:
        if batch.get(key) is not None:
            tokens[key] = _ids(_chunked(key, batch[key], rows, length, chunks))
    positions = batch.get("position_ids")
    if positions is not None and positions.dim() == 3:
        positions = positions.movedim(0, 2)  # mRoPE: its axis goes last until the end, so that tokens are axis 1
    if positions is not None:
        tokens["position_ids"] = _ids(_chunked("position_ids", positions, rows, length, chunks))
    return _with_layout(tokens, streams, first.device), streams


def _documents_of_rows(batch: Mapping[str, Any], rows: int, length: int, filler: int) -> list[PackedStream]:
    real = row_lengths(batch["seq_lens"], "seq_lens", filler)
    padded = row_lengths(batch["seq_lens_padded"], "seq_lens_padded", filler)
    if not len(real) == len(padded) == rows:
        raise ConfigError(f"there are {rows} rows, but seq_lens of {len(real)} and seq_lens_padded of {len(padded)}")
    documents = []
    for row, (ours, places) in enumerate(zip(real, padded, strict=True)):
        if len(ours) != len(places):
            raise ConfigError(f"row {row}: seq_lens has {len(ours)} documents, but seq_lens_padded has {len(places)}")
        for n, m in zip(ours, places, strict=True):
            if not 0 <= n <= m or m == 0:
                raise ConfigError(
                    f"row {row}: a document of seq_lens {n} cannot lie in seq_lens_padded {m} places (fillers are "
                    f"{filler})"
                )
        if sum(places) != length:
            raise ConfigError(
                f"row {row}: seq_lens_padded {places} sum to {sum(places)}, but the row has {length} places: count "
                "unused space to the last document"
            )
        documents.append(PackedStream(ours, places))
    return documents


def _chunked(key: str, values: Tensor, rows: int, length: int, chunks: int) -> Tensor:
    """[B, S, ...] -> [N, B * S / N, ...]."""
    if tuple(values.shape[:2]) != (rows, length):
        raise ConfigError(f"{key} has shape {list(values.shape)}, but the rows are {[rows, length]}")
    return values.reshape(chunks, -1, *values.shape[2:])


def _given_stream(
    batch: Mapping[str, Any], chunks: int, padding_id: int
) -> tuple[dict[str, Tensor], list[PackedStream]]:
    """As `_flattened_rows`, of a batch that is one stream with its boundaries."""
    if batch.get("cu_seqlens") is None:
        raise ConfigError("a packed stream needs cu_seqlens, or rows with seq_lens and seq_lens_padded")
    if chunks > 1:
        raise ConfigError(f"a batch that is one stream cannot be divided among num_chunks {chunks}: pass rows")
    first = _tokens_of(batch)
    total = first.shape[first.dim() - 1 - int(first.is_floating_point())]
    tokens = {}
    for key in _TOKEN_KEYS:
        if batch.get(key) is not None:
            width = batch[key].shape[-1:] if batch[key].is_floating_point() else ()
            tokens[key] = _ids(_one_stream(key, batch[key], total, tuple(width)))
    positions = batch.get("position_ids")
    if positions is not None:
        several = positions.dim() == 3 or (positions.dim() == 2 and positions.shape[0] > 1)  # mRoPE [n, T], [n, 1, T]
        moved = positions.movedim(0, -1) if several else positions
        tokens["position_ids"] = _ids(_one_stream("position_ids", moved, total, tuple(moved.shape[-1:] * several)))

    lengths = _differences("cu_seqlens", batch["cu_seqlens"])
    padded = lengths
    if batch.get("cu_seqlens_padded") is not None:
        padded = _differences("cu_seqlens_padded", batch["cu_seqlens_padded"])
    fits = len(lengths) == len(padded) and all(n <= m for n, m in zip(lengths, padded, strict=True))
    if not fits or sum(padded) != total:
        raise ConfigError(f"documents of {lengths} tokens in {padded} places do not make up a stream of {total} places")
    stream = PackedStream(lengths, padded)
    padding = None
    if lengths == padded and batch.get("padding_mask") is not None:
        padding = _one_stream("padding_mask", batch["padding_mask"], total, ()).bool()
    elif lengths == padded and "input_ids" in tokens and not tokens["input_ids"].is_floating_point():
        padding = _padding_by_value(tokens, stream, padding_id).unsqueeze(0)
    return _with_layout(tokens, [stream], first.device, padding), [stream]


def _one_stream(key: str, values: Tensor, total: int, width: tuple[int, ...]) -> Tensor:
    """[T, ...] or [1, T, ...] -> [1, T, ...]."""
    if tuple(values.shape) not in ((total, *width), (1, total, *width)):
        raise ConfigError(f"{key} has shape {list(values.shape)}, but the stream has {total} places")
    return values.reshape(1, total, *width)


def _differences(name: str, boundaries: Tensor) -> list[int]:
    if boundaries.dim() == 2 and boundaries.shape[0] == 1:
        boundaries = boundaries.squeeze(0)
    if boundaries.dim() != 1:
        raise ConfigError(f"{name} must be one row of boundaries, got shape {list(boundaries.shape)}")
    values = [value for value in boundaries.tolist() if value >= 0]
    lengths = [stop - start for start, stop in pairwise(values)]
    if not lengths or values[0] != 0 or min(lengths) < 0:
        raise ConfigError(f"{name} must rise from 0, got {values}")
    return lengths


def _padding_by_value(tokens: Mapping[str, Tensor], stream: PackedStream, padding_id: int) -> Tensor:
    """bool [T]: the places at the end of each document that hold `padding_id`.

    Raises ConfigError where the id is content as well: before a document's last token, or in a place with a label.
    """
    is_pad = tokens["input_ids"][0].cpu() == padding_id
    within = stream.within()
    numbers = torch.arange(len(stream.padded)).repeat_interleave(torch.tensor(stream.padded))
    last = torch.full((len(stream.padded),), -1).scatter_reduce(0, numbers, within.masked_fill(is_pad, -1), "amax")
    padding = within > last[numbers]
    content = is_pad & ~padding
    for key in ("labels", "targets"):
        if key in tokens:
            content |= is_pad & (tokens[key][0].cpu() != NO_LABEL)
    if content.any():
        place = int(content.nonzero()[0])
        raise ConfigError(
            f"padding_token_id {padding_id} is also content (place {place} of the stream), so it does not tell where "
            "padding is: pass seq_lens and seq_lens_padded, cu_seqlens_padded, or a padding_mask"
        )
    return padding


def _with_layout(
    tokens: dict[str, Tensor], streams: Sequence[PackedStream], device: torch.device, padding: Tensor | None = None
) -> dict[str, Tensor]:
    """The tokens with their padding mask and positions."""
    if padding is None:
        padding = torch.stack([stream.padding() for stream in streams])
    tokens["padding_mask"] = padding.to(device)
    if "position_ids" not in tokens:
        tokens["position_ids"] = torch.stack([stream.within() for stream in streams]).to(device)
    return tokens


def _ids(values: Tensor) -> Tensor:
    return values if values.is_floating_point() else values.long()


def cumulative(lengths: Sequence[int]) -> list[int]:
    """Boundaries of documents of these lengths, 0 first."""
    return [0, *accumulate(lengths)]
