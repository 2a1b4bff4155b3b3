"""A packed stream shared by the ranks of a context-parallel group: who has which tokens, and how batches are cut."""

from automimo.distributed.context.layout import ShardLayout, contiguous_indices, identity_indices, zigzag_indices
from automimo.distributed.context.partition import chunks_of, padded_lengths, stream_order, thd_partition
from automimo.distributed.context.sharder import ContextParallelSharder
from automimo.distributed.context.te_batch import make_cp_batch_for_te

__all__ = [
    "ContextParallelSharder",
    "ShardLayout",
    "chunks_of",
    "contiguous_indices",
    "identity_indices",
    "make_cp_batch_for_te",
    "padded_lengths",
    "stream_order",
    "thd_partition",
    "zigzag_indices",
]
