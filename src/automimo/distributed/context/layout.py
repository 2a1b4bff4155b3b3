"""Where the tokens of a batch are once several ranks share it, and token tensors to and from the stream they share.

The *stream* is what the ranks share: all tokens, padding included, in their global order. A *share* is what one rank
has of it, in its own order. A layout says which places of the stream a share has, and how the input became the stream.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from automimo.errors import ConfigError


@dataclass(frozen=True)
class ShardLayout:
    """Where the tokens of a batch are after `shard`. What is None is not known or not the case.

    local_token_global_indices: int64 [L], the place in the stream of each token of this rank; every rank has L.
    original_seq_len: tokens along the sequence before they were padded at the end.
    padded_seq_len: places of the stream; None = L times the ranks.
    input_row_shape: (B, S) of an input of rows, which the stream has one after the other.
    input_token_stream_positions: int64, for each token of the (flattened) input its place in the stream, -1 for one
        that is not in it. Only for a stream that has its tokens in other places than the input.
    """

    local_token_global_indices: Tensor | None = None
    original_seq_len: int | None = None
    padded_seq_len: int | None = None
    input_row_shape: tuple[int, int] | None = None
    input_token_stream_positions: Tensor | None = None


def contiguous_indices(seq_len: int, size: int, rank: int) -> Tensor:
    """One run of the sequence for each rank: int64 [seq_len / size]. Raises ConfigError when that does not divide."""
    if seq_len % size:
        raise ConfigError(f"a sequence of {seq_len} tokens is not divisible by cp_size = {size}: pad it")
    length = seq_len // size
    return torch.arange(rank * length, (rank + 1) * length)


def zigzag_indices(seq_len: int, size: int, rank: int) -> Tensor:
    """Chunks `rank` and 2 * size - 1 - rank of 2 * size equal ones, as for a single document (round-robin).

    Raises ConfigError when the sequence is not divisible by 2 * size.
    """
    if seq_len % (2 * size):
        raise ConfigError(f"a sequence of {seq_len} tokens is not divisible by 2 * cp_size = {2 * size}: pad it")
    chunks = torch.arange(seq_len).view(2 * size, -1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def identity_indices(seq_len: int, size: int, rank: int) -> Tensor:
    """Everything on one rank. Raises ConfigError for several, of which each would hold all of it."""
    if size != 1:
        raise ConfigError(f"an unshared sequence is on one rank, not on {size} (this is rank {rank})")
    return torch.arange(seq_len)


def merged_rows(t: Tensor, dim: int, layout: ShardLayout) -> tuple[Tensor, int]:
    """Rows as one dimension; whatever is not the rows of the input is left as it is."""
    if layout.input_row_shape is not None and dim > 0 and tuple(t.shape[dim - 1 : dim + 1]) == layout.input_row_shape:
        return t.flatten(dim - 1, dim), dim - 1
    return t, dim


def _positions(layout: ShardLayout, places: int) -> Tensor | None:
    """Place in the stream of every token of the input; None where the two are the same."""
    if layout.input_token_stream_positions is not None:
        return layout.input_token_stream_positions
    if layout.original_seq_len is not None and layout.original_seq_len != places:
        return torch.arange(layout.original_seq_len)
    return None


def to_stream(t: Tensor, dim: int, fill: float | None, layout: ShardLayout, places: int) -> Tensor:
    length = t.shape[dim]
    positions = _positions(layout, places)
    if positions is None or length != positions.numel():
        if length != places:
            known = "" if positions is None else f" or {positions.numel()} of the input"
            raise ConfigError(f"the tensor has {length} tokens along dimension {dim}; expected {places}{known}")
        return t
    positions = positions.to(t.device)
    kept = positions >= 0
    source = torch.full((places,), -1, device=t.device)
    source[positions[kept]] = torch.arange(length, device=t.device)[kept]
    return _picked(t, dim, source, fill, f"the {places} places of the stream")


def trimmed(stream: Tensor, dim: int, fill: float | None, layout: ShardLayout) -> Tensor:
    positions = _positions(layout, stream.shape[dim])
    rows = layout.input_row_shape
    if positions is None and rows is None and layout.original_seq_len is None:
        raise NotImplementedError("trim needs a layout with original_seq_len or input_row_shape; this one has neither")
    if positions is not None:
        stream = _picked(stream, dim, positions.to(stream.device), fill, f"the {positions.numel()} tokens of the input")
    if rows is None:
        return stream
    if rows[0] * rows[1] != stream.shape[dim]:
        raise ConfigError(f"{stream.shape[dim]} tokens are not the rows {list(rows)} of the layout (input_row_shape)")
    return stream.unflatten(dim, rows)


def _picked(t: Tensor, dim: int, source: Tensor, fill: float | None, what: str) -> Tensor:
    """t[source] along `dim`, with `fill` where source is -1."""
    missing = source < 0
    if not missing.any():
        return t.index_select(dim, source)
    if fill is None:
        raise ConfigError(f"{int(missing.sum())} of {what} have no value: pass fill")
    shape = [-1 if d == dim else 1 for d in range(t.dim())]
    return t.index_select(dim, source.clamp(min=0)).masked_fill(missing.view(shape), fill)
