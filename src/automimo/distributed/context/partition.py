"""Which tokens of a packed stream belong to which rank of a context-parallel group (DualChunkSwap).

The rule is that of Transformer Engine's `thd_get_partitioned_indices`: every document is cut into 2 * R equal chunks,
and rank r of R has chunk r and then chunk 2 * R - 1 - r, document by document. Early tokens see few keys and late ones
many, so pairing the ends gives every rank the same number of visible pairs under causal attention.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from automimo.errors import ConfigError


def chunks_of(boundaries: Sequence[int], size: int, rank: int) -> list[tuple[int, int, int]]:
    """The chunks of `rank` in the order in which it holds them: (number of the document, first token, end).

    `boundaries` are the cumulative lengths of the documents, 0 first. Raises ConfigError for a rank that does not
    exist and for a document whose length is not a multiple of 2 * size.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"there is no context-parallel rank {rank} among {size}")
    chunks = []
    for document, (start, stop) in enumerate(pairwise(boundaries)):
        length = stop - start
        if length % (2 * size):
            raise ConfigError(
                f"document {document} has {length} tokens, which is not divisible by 2 * cp_size = {2 * size}: pad "
                f"every document to a multiple of {2 * size}"
            )
        chunk = length // (2 * size)
        if chunk:
            chunks.append((document, start + rank * chunk, start + (rank + 1) * chunk))
            chunks.append((document, stop - (rank + 1) * chunk, stop - rank * chunk))
    return chunks


def thd_partition(boundaries: Sequence[int], size: int, rank: int) -> Tensor:
    """Places in the stream of the tokens of `rank`, in its own order: int64 [T / size], on the CPU.

    Raises ConfigError as `chunks_of`.
    """
    chunks = chunks_of(boundaries, size, rank)
    if not chunks:
        return torch.zeros(0, dtype=torch.int64)
    starts, stops = (torch.tensor(values) for values in list(zip(*chunks, strict=True))[1:])
    lengths = stops - starts
    shifts = starts - (lengths.cumsum(0) - lengths)  # from the place among our tokens to the place in the stream
    total = boundaries[-1] // size
    return torch.arange(total) + shifts.repeat_interleave(lengths, output_size=total)


def stream_order(boundaries: Sequence[int], size: int) -> Tensor:
    """For every place of the stream, where its token is in the shares of all ranks put one after the other: int64 [T],
    on the CPU."""
    shares = torch.cat([thd_partition(boundaries, size, rank) for rank in range(size)])
    return torch.empty_like(shares).scatter_(0, shares, torch.arange(shares.numel()))


def padded_lengths(lengths: Sequence[int], size: int) -> list[int]:
    """The lengths of documents, each raised to the next multiple of 2 * size (unchanged for one rank)."""
    if size == 1:
        return list(lengths)
    return [-(-length // (2 * size)) * 2 * size for length in lengths]
