"""What activation checkpointing must not recompute: the router's choice, and on request results dear for their size."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Choose = Callable[[Any], bool]
Contexts = tuple[TorchDispatchMode, TorchDispatchMode]

_CHOICE = {torch.ops.aten.topk.default}
_RECEIVED = {torch.ops._c10d_functional.all_to_all_single.default}
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default}


def router_frozen_contexts() -> Contexts:
    """`context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`: recompute all but the choice.

    A matmul that is run again may differ in the last bit and send a token to another expert, and the rows saved by the
    first pass no longer fit. The results of top-k are therefore kept (K integers and K numbers per token); everything
    else is recomputed.
    """
    return _contexts(_CHOICE.__contains__)


def selective_contexts() -> Contexts:
    """As `router_frozen_contexts`, but what is dear to compute for its size is kept as well: the rows that other ranks
    have sent, and every second matrix product. The rest, attention's tiles included, is recomputed."""
    products = 0

    def keep(op: Any) -> bool:
        nonlocal products
        if op in _PRODUCTS:
            products += 1
            return products % 2 == 0
        return op in _CHOICE or op in _RECEIVED

    return _contexts(keep)


def _contexts(keep: Choose) -> Contexts:
    kept: dict[tuple[Any, int], Any] = {}
    return _Keep(keep, kept), _Replay(kept)


class _Keep(TorchDispatchMode):
    """Stores the results of chosen operations by their number: the third topk of the region, and so on.

    torch's own selective contexts demand that both passes run exactly the same operations. Under FSDP they do not: the
    parameters of a unit inside the region are gathered by whichever pass or prefetch comes first.
    """

    def __init__(self, keep: Choose, kept: dict[tuple[Any, int], Any]) -> None:
        super().__init__()
        self.keep, self.kept = keep, kept
        self.count: defaultdict[Any, int] = defaultdict(int)

    def __torch_dispatch__(self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op in _KEPT_KINDS:
            number = self.count[op]
            self.count[op] += 1
            if self.keep(op):
                self.kept[op, number] = _aliases(result)
        return result


class _Replay(TorchDispatchMode):
    """Gives the stored results back instead of running the operations again."""

    def __init__(self, kept: dict[tuple[Any, int], Any]) -> None:
        super().__init__()
        self.kept = kept
        self.count: defaultdict[Any, int] = defaultdict(int)

    def __enter__(self) -> Any:
        self.count.clear()  # a graph that is kept is recomputed at every backward
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if op in _KEPT_KINDS:
            number = self.count[op]
            self.count[op] += 1
            if (op, number) in self.kept:
                return _aliases(self.kept[op, number])
        return op(*args, **(kwargs or {}))


_KEPT_KINDS = _CHOICE | _RECEIVED | _PRODUCTS


def _aliases(result: Any) -> Any:
    """The same memory as new tensors, so that neither pass can hang a history on the stored ones."""
    return result.detach() if isinstance(result, Tensor) else tuple(tensor.detach() for tensor in result)
