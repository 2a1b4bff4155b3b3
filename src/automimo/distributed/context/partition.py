"""Which tokens of a packed stream belong to which rank of a context-parallel group (DualChunkSwap).

The rule is that of Transformer Engine's `thd_get_partitioned_indices`: every document is cut into 2 * R equal chunks,
and rank r of R has chunk r and then chunk 2 * R - 1 - r, document by document. Early tokens see few keys and late ones
many, so pairing the ends gives every rank the same number of visible pairs under causal attention.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from automimo.errors import ConfigError


def chunks_of(boundaries: Sequence[int], size: int, rank: int) -> Tensor:
    """The chunks of `rank` in the order in which it holds them: int64 [C, 3] on the CPU, each with the number of its
    document, its first token and its end.

    `boundaries` are the cumulative lengths of the documents, 0 first. Raises ConfigError for a rank that does not
    exist and for a document whose length is not a multiple of 2 * size.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"there is no context-parallel rank {rank} among {size}")
    bounds = torch.tensor(boundaries, dtype=torch.int64)
    lengths = bounds.diff()
    uneven = (lengths % (2 * size)).nonzero()
    if uneven.numel():
        document = int(uneven[0])
        raise ConfigError(
            f"document {document} has {int(lengths[document])} tokens, which is not divisible by 2 * cp_size = "
            f"{2 * size}: pad every document to a multiple of {2 * size}"
        )
    chunk = lengths // (2 * size)
    early, late = bounds[:-1] + rank * chunk, bounds[1:] - (rank + 1) * chunk
    firsts = torch.stack([early, late], 1)
    documents = torch.arange(len(lengths)).unsqueeze(1).expand(-1, 2)
    chunks = torch.stack([documents, firsts, firsts + chunk.unsqueeze(1)], 2).flatten(0, 1)
    return chunks[chunks[:, 1] < chunks[:, 2]]  # documents may be empty


def thd_partition(boundaries: Sequence[int], size: int, rank: int) -> Tensor:
    """Places in the stream of the tokens of `rank`, in its own order: int64 [T / size], on the CPU.

    Raises ConfigError as `chunks_of`.
    """
    _, starts, stops = chunks_of(boundaries, size, rank).unbind(1)
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
