"""Which part of a step's rows a rank computes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from automimo.data import DataStream
from automimo.data.batches import NO_TARGET, Batch, pad_documents, share_rows
from automimo.data.packing import Piece
from automimo.distributed.context.partition import thd_partition
from automimo.distributed.mesh import ParallelSizes


@dataclass(frozen=True)
class Place:
    """A rank among those that share the rows of a step (`data_rank` of `data_ranks`) and, of each row, the tokens
    (`context_rank` of `context_ranks`)."""

    data_rank: int = 0
    data_ranks: int = 1
    context_rank: int = 0
    context_ranks: int = 1

    @classmethod
    def of(cls, rank: int, sizes: ParallelSizes) -> "Place":
        """The place of `rank` in the meshes of `sizes`, whose innermost dimension is `cp`."""
        in_stage = rank % sizes.stage
        return cls(in_stage // sizes.context, sizes.data, in_stage % sizes.context, sizes.context)

    def micro_batches(self, stream: DataStream, rows: Sequence[Sequence[Piece]], micro_batch: int) -> list[Batch]:
        """This rank's micro-batches of the rows of a step; every rank gets equally many."""
        shares = share_rows(rows, micro_batch, self.data_rank, self.data_ranks)
        return [self.tokens_of(stream.batch(share)) for share in shares]

    def batches(self, stream: DataStream, micro_batch: int) -> Iterator[Batch]:
        """This rank's micro-batches of everything that the stream has left; every rank gets equally many."""
        return map(self.tokens_of, stream.batches(micro_batch, self.data_rank, self.data_ranks))

    def tokens_of(self, batch: Batch) -> Batch:
        """This rank's share of the tokens of a batch, in which every document is padded to equal chunks first.

        The boundaries stay those of the whole stream, as the model needs them; the counts are those of the share.
        """
        if self.context_ranks == 1:
            return batch
        padded = pad_documents(batch, 2 * self.context_ranks)
        own = thd_partition(padded.cu_seqlens.tolist(), self.context_ranks, self.context_rank)
        targets, padding = padded.targets[own], None if padded.padding_mask is None else padded.padding_mask[own]
        return replace(
            padded,
            input_ids=padded.input_ids[own],
            targets=targets,
            position_ids=padded.position_ids[own],
            padding_mask=padding,
            valid_targets=int((targets != NO_TARGET).sum()),
            tokens=own.numel() - (0 if padding is None else int(padding.sum())),
            cp_size=self.context_ranks,
            cp_rank=self.context_rank,
        )
