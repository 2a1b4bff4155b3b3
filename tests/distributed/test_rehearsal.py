"""The rehearsal's counts are those of a real step: every collective that gloo ranks make, by kind, ranks and bytes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from toy import EXPERTS, Case, make_model

from automimo.data import DataStream, Example
from automimo.distributed.mesh import build_meshes, infer_sizes
from automimo.distributed.watchdog import Watchdog
from automimo.parallelize import ParallelConfig, parallelize
from automimo.training.collectives import ALL_TO_ALL
from automimo.training.loop import Loop, train_loop
from automimo.training.metrics import NoMetrics
from automimo.training.optimizer import make_optimizer
from automimo.training.place import Place
from automimo.training.precision import MasterWeights
from automimo.training.progress import step_display
from automimo.training.recipe import (
    DataSection,
    ModelSection,
    MoESection,
    OptimSection,
    Recipe,
    SourceSection,
    TrainSection,
)
from automimo.training.rehearsal import pretended_ranks, share_of_rank
from automimo.training.state import TrainingState
from automimo.training.stop import StopRequest
from automimo.training.traffic import count_traffic

ROW = 24  # tokens; all rows are full, as the rehearsal assumes
Counts = Counter[tuple[str, int, int]]
KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_to_all_single": "all-to-all",
}
WAITS = {"wait_tensor", "_wrap_tensor_autograd"}


class CountCollectives(TorchDispatchMode):
    """Counts what goes to a process group: (kind, ranks, bytes of the whole tensor). An unknown one is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace in ("c10d", "_c10d_functional") and op._opname not in WAITS:
            kind = KINDS[op._opname]
            if op.namespace == "c10d":
                group = next(a for a in args if isinstance(a, torch.ScriptObject))
                ranks = dist.ProcessGroup.unbox(group).size()
                tensors = [args[0] if kind == "all-gather" else args[1]] if kind != "all-reduce" else args[0]
            else:
                ranks = dist.distributed_c10d._resolve_process_group(args[-1]).size()
                tensors = [args[0]]
            self.counts[kind, ranks, sum(t.numel() * t.element_size() for t in tensors)] += 1
        return op(*args, **(kwargs or {}))


def rows() -> DataStream:
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(0, 61, ROW).astype(np.int32), np.ones(ROW, bool), f"doc:{i}") for i in range(40)]
    return DataStream(examples, sequence_length=ROW)


def recipe(case: Case) -> Recipe:
    return Recipe(
        output="run",
        model=ModelSection(preset="tiny"),
        moe=MoESection(bias_update_speed=case.moe["gate_bias_update_factor"]),
        data=DataSection(train=(SourceSection(kind="python_docs"),), sequence_length=ROW),
        train=TrainSection(steps=1, batch=case.batch, micro_batch=case.micro, loss_chunk=16),
    )


def real_steps(rank: int, cases: Sequence[Case]) -> list[Counts]:
    return [real_step(rank, case) for case in cases]


def real_step(rank: int, case: Case) -> Counts:
    """The collectives of the loop around one step. Before a step, and once more at the end, it asks who was stopped."""
    ranks = dist.get_world_size()
    model = make_model(case)
    sizes = infer_sizes(ranks, n_experts=EXPERTS, **case.mesh)
    parallelize(model, build_meshes(sizes, "cpu"), case.config)
    masters = MasterWeights(model, torch.float32)
    state = TrainingState(model, masters, make_optimizer(masters.trainable, OptimSection()), rows())
    console = Console(quiet=True)
    loop = Loop(
        recipe(case), Place.of(rank, sizes), 1, None, NoMetrics(), step_display(console, 0, 1),
        StopRequest(shared=True), Watchdog(None), save=lambda: None, publish=lambda: None,
    )  # fmt: skip
    with CountCollectives() as counted:
        train_loop(state, loop, saved=False)
    counted.counts["all-reduce", ranks, 8] -= 1  # the question at the end
    return counted.counts


def rehearsed(rank: int, ranks: int, case: Case) -> Counts:
    with pretended_ranks(ranks, rank):
        with torch.device("meta"):
            model = make_model(case)
        sizes = infer_sizes(ranks, n_experts=EXPERTS, **case.mesh)
        parallelize(model, build_meshes(sizes, "cpu"), case.config)
        micro_batches = share_of_rank(model, case.batch, case.micro, ROW, rank, sizes)
        collectives = count_traffic(model, micro_batches).collectives
    return Counter((c.kind, c.ranks, c.payload) for c in collectives)


EP2, HSDP, CP2 = {"expert": 2}, {"replicate": 2}, {"context": 2}
QUIET = {"gate_bias_update_factor": 0.0, "aux_loss_coeff": 0.0}
BF16 = ParallelConfig(dtype=torch.bfloat16)
FULL, SELECTIVE = ParallelConfig(activation_checkpointing="full"), ParallelConfig(activation_checkpointing="selective")
KEPT = ParallelConfig(reshard=False)
ALL_BUT_EXPERTS = ("embed", "layers.0", "self_attn", "norm", "mlp.gate.", "lm_head")
ALL_BUT_QUERIES = ("embed", "k_proj", "v_proj", "o_proj", "norm", "gate", "experts", "mlp", "lm_head")
NARROW = {"sliding_window": 2}  # of which the halos of a row of 24 tokens are a fraction
ALL_BUT_ROUTERS = ("embed", "self_attn", "norm", "experts", "_proj.", "lm_head")
CASES = {
    2: {
        "dp": Case(),
        "dp, sinks frozen, no prefetch": Case(config=ParallelConfig(prefetch=0), sinks=False),
        "dp, accumulation 3": Case(batch=6),
        "dp, accumulation 3, no prefetch": Case(config=ParallelConfig(prefetch=0), batch=6),
        "dp, accumulation 3, sync at every micro-batch": Case(batch=6, defer_sync=False),
        "dp, kept": Case(config=KEPT),
        "dp, kept, accumulation 3": Case(config=KEPT, batch=6),
        "dp, kept, accumulation 3, sync at every micro-batch": Case(config=KEPT, batch=6, defer_sync=False),
        "dp, full checkpointing, far prefetch": Case(config=replace(FULL, prefetch=3)),
        "dp, bf16": Case(config=BF16),
        "dp, offloaded": Case(config=ParallelConfig(offload=True)),
        "ep": Case(EP2),
        "ep, bf16, accumulation 3": Case(EP2, BF16, batch=6),
        "ep, full checkpointing": Case(EP2, FULL),
        "ep, selective checkpointing, accumulation 3": Case(EP2, SELECTIVE, batch=6),
        "ep, frozen embedding and experts": Case(EP2, frozen=("embed", "experts"), sinks=False),
        "ep, the first layers frozen": Case(EP2, frozen=("embed", "layers.0", "layers.1"), sinks=False),
        "ep, the first layers frozen, full checkpointing, accumulation 3": Case(
            EP2, FULL, batch=6, frozen=("embed", "layers.0", "layers.1"), sinks=False
        ),
        "dp, the first layers frozen, accumulation 3, sync at every micro-batch": Case(
            batch=6, frozen=("embed", "layers.0", "layers.1"), sinks=False, defer_sync=False
        ),
        "ep, only experts": Case(EP2, frozen=ALL_BUT_EXPERTS, sinks=False, moe=QUIET),
        "ep, only experts, full checkpointing": Case(EP2, FULL, frozen=ALL_BUT_EXPERTS, sinks=False, moe=QUIET),
        "ep, only routers": Case(EP2, frozen=ALL_BUT_ROUTERS, sinks=False),
        "dp, frozen router": Case(frozen=("mlp.gate.",), moe=QUIET),
        "cp": Case(CP2),
        "cp x ep, full checkpointing, accumulation 3": Case({**CP2, **EP2}, FULL, batch=3),
        "cp, selective checkpointing, no balance loss": Case(CP2, SELECTIVE, moe=QUIET),
        "cp, bf16": Case(CP2, BF16),
        "cp, halos, accumulation 3": Case(CP2, batch=3, micro=1, model=NARROW),
        "cp, halos, full checkpointing": Case(CP2, FULL, model=NARROW),
        "cp, halos, selective checkpointing": Case(CP2, SELECTIVE, model=NARROW),
        "cp, halos, only queries": Case(CP2, frozen=ALL_BUT_QUERIES, sinks=False, model=NARROW, moe=QUIET),
        "cp, the first layers frozen, full checkpointing": Case(CP2, FULL, frozen=("embed", "layers.0"), sinks=False),
        "cp, only sinks": Case(CP2, frozen=("embed", "proj", "norm", "gate", "experts", "lm_head"), moe=QUIET),
        "cp, only experts": Case({**CP2, **EP2}, frozen=ALL_BUT_EXPERTS, sinks=False, moe=QUIET),
    },
    4: {
        "dp": Case(),
        "hsdp": Case(HSDP),
        "hsdp, accumulation 3": Case(HSDP, batch=12),
        "hsdp, accumulation 3, sync at every micro-batch": Case(HSDP, batch=12, defer_sync=False),
        "replicas only": Case({"replicate": 4}),
        "ep 4": Case({"expert": 4}),
        "ep 2 x fsdp 2": Case(EP2),
        "ep 2 x fsdp 2, accumulation 3, full checkpointing": Case(EP2, FULL, batch=12),
        "ep 2 x fsdp 2, kept, bf16": Case(EP2, replace(BF16, reshard=False), batch=8),
        "hsdp x ep 2, micro-batches of 2 rows, one short": Case({"replicate": 2, "expert": 2}, batch=12, micro=2),
        "cp 2 x fsdp 2 x ep 4, accumulation 2": Case({**CP2, "expert": 4}, batch=4),
        "cp 4": Case({"context": 4}, batch=2),
        "cp 4 x ep 2, windows of one token": Case({"context": 4, **EP2}, batch=2, model={"sliding_window": 1}),
        "cp 2 x hsdp 2, a rank without a row": Case({**CP2, **HSDP}, batch=1),
        "a rank without a row": Case({"replicate": 2, "expert": 4}, batch=3),
    },
}


FAST: dict[int, set[str]] = {
    2: {"dp, accumulation 3", "ep, full checkpointing", "cp x ep, full checkpointing, accumulation 3"},
    4: set(),
}


@cache
def real(size: int, fast: bool) -> dict[str, list[Counts]]:
    """By name, what each rank counted."""
    cases = {name: case for name, case in CASES[size].items() if (name in FAST[size]) == fast}
    of_ranks = run_ranks(size, real_steps, list(cases.values()), timeout=170)
    return {name: [counts[number] for counts in of_ranks] for number, name in enumerate(cases)}


def marks(size: int, *, slow: bool) -> list[pytest.MarkDecorator]:
    """One worker for all cases of a group of processes, which would otherwise run once in each."""
    group = pytest.mark.xdist_group(f"rehearsal-{size}-{slow}")
    return [group, pytest.mark.slow] if slow else [group]


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=marks(size, slow=name not in FAST[size]))
        for size, cases in CASES.items()
        for name in cases
    ],
)
def test_every_collective_of_a_step_is_foreseen(size: int, name: str) -> None:
    case = CASES[size][name]
    rows_real = rows_foreseen = 0
    for rank in range(size):
        counted, foreseen = real(size, name in FAST[size])[name][rank], rehearsed(rank, size, case)
        for counts in (counted, foreseen):
            assert counts.total() == sum(counts.values()) > 0
        # How many rows travel depends on the router; how often they do, and their sum over the ranks, does not.
        assert without_rows(counted) == without_rows(foreseen)
        rows_real += sum(payload * n for (kind, _, payload), n in counted.items() if kind == ALL_TO_ALL)
        rows_foreseen += sum(payload * n for (kind, _, payload), n in foreseen.items() if kind == ALL_TO_ALL)
    assert rows_real == rows_foreseen
    assert (rows_real > 0) == ("expert" in case.mesh or "context" in case.mesh)


def without_rows(counts: Counts) -> Counts:
    result: Counts = Counter()
    for (kind, ranks, payload), n in counts.items():
        result[kind, ranks, -1 if kind == ALL_TO_ALL else payload] += n
    return result
