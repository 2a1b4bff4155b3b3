"""What the ranks of a step send each other, as numbers."""

from dataclasses import dataclass, field

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
FP32, FP64, INT64 = 4, 8, 8


@dataclass(frozen=True)
class Collective:
    """One collective of a rank. `what`: parameters, gradients, tokens, heads, halos or control. `ranks`: of its group.

    payload: bytes of the whole tensor, which is the gathered one of an all-gather and what goes in of all others (of an
    all-to-all, the rows for all ranks, our own included). to_self: whether an equal share of it stays here.
    """

    kind: str
    what: str
    ranks: int
    payload: int
    to_self: bool = True

    @property
    def sent(self) -> float:
        """Bytes that this rank sends to others: what a ring, or a direct all-to-all, takes."""
        share = (self.ranks - 1) / self.ranks * self.payload if self.to_self else self.payload
        return 2 * share if self.kind == ALL_REDUCE else share


@dataclass(frozen=True)
class MicroBatch:
    """tokens: of this rank; places: with the padding of its documents. arriving: tokens of the ranks that share the
    experts, as a mean over them, since balanced routing sends each of these ranks the same number of rows. documents:
    of the rows that this rank has tokens of. halo: rows that it sends and gets for each layer with a window; None where
    these exchange heads."""

    tokens: int
    places: int
    arriving: float
    documents: int
    halo: tuple[int, int] | None


@dataclass
class Traffic:
    """Collectives in the order of the host. parameters, gradients: the most bytes of gathered parameters, and of whole
    gradients and their buffers, that exist at a time (the two may be at different times)."""

    collectives: list[Collective] = field(default_factory=list)
    parameters: int = 0
    gradients: int = 0
