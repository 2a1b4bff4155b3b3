"""Training in 2 and 4 processes equals training in one: loss and every gradient at every step, weights, bias, counts.

The cases of one number of processes run one after the other in the same processes, which saves starting them; those
of SLOW, which differ less from others, by themselves.
"""

from functools import cache

import pytest
from ranks import run_ranks
from toy import Case, Outcome, assert_equal_training, batches, long_and_tiny, one_process, several_processes

from automimo.attention.halo import halo_pays
from automimo.parallelize import ParallelConfig
from automimo.training.place import Place

EP2, HSDP, CP2 = {"expert": 2}, {"replicate": 2}, {"context": 2}
# Rows of which sliding layers exchange halos, and others of which they exchange heads. With windows of 3 tokens many
# gradients of queries are next to nothing: at lr 3e-3 one process differs from itself with other micro-batches by 7e-6.
IN_TURN = {"data": long_and_tiny, "model": {"sliding_window": 3}, "lr": 3e-4}
QUIET = {"gate_bias_update_factor": 0.0, "aux_loss_coeff": 0.0}
FULL, SELECTIVE = ParallelConfig(activation_checkpointing="full"), ParallelConfig(activation_checkpointing="selective")

# 4 rows of 14 to 24 tokens per step unless said otherwise, so ranks never have equally many tokens.
CASES = {
    2: {
        "dp": Case(),
        "ep 2": Case(EP2),
        "dp, accumulation 3": Case(batch=6),
        "ep 2, accumulation 3, one micro-batch short": Case(EP2, batch=11, micro=2),
        "a rank without a row": Case(EP2, batch=1),
        "a rank without a row in its last micro-batch": Case(batch=3),
        "a rank without a valid token": Case(EP2, masked=True, batch=2),
        "frozen experts and embedding, sinks frozen": Case(EP2, frozen=("experts", "embed"), sinks=False),
        "frozen router, never-used parameters": Case(frozen=("mlp.gate",), unused=True, moe=QUIET),
        "clipped": Case(EP2, clip=0.5),
        "kept gathered, no prefetch": Case(EP2, ParallelConfig(reshard=False, prefetch=0), batch=6),
        "sync at every micro-batch": Case(EP2, batch=6, defer_sync=False),
        "offloaded": Case(EP2, ParallelConfig(offload=True)),
        "full activation checkpointing": Case(EP2, FULL),
        "selective activation checkpointing": Case(EP2, SELECTIVE, batch=6),
        "experts that no token chooses": Case(EP2, dead_experts=True),
        "experts as a loop": Case(EP2, experts="torch"),
        "compiled": Case(EP2, ParallelConfig(compile=True, activation_checkpointing="full")),
        "cp 2": Case(CP2, batch=2),
        "cp 2 x ep 2, accumulation 3": Case({**CP2, **EP2}, batch=3),
        "cp 2, full activation checkpointing": Case({**CP2, **EP2}, FULL, batch=2),
        "cp 2, selective activation checkpointing": Case({**CP2, **EP2}, SELECTIVE, batch=2, clip=0.5),
        "cp 2, micro-batches without a target": Case(CP2, masked=True, batch=3),
        "cp 2, frozen parts": Case({**CP2, **EP2}, frozen=("experts", "embed"), sinks=False, batch=2),
        "cp 2, sync at every micro-batch": Case(CP2, batch=3, defer_sync=False),
        "cp 2 x ep 2, halos and heads in turn, full": Case({**CP2, **EP2}, FULL, batch=6, steps=3, **IN_TURN),
        "cp 2, halos and heads in turn": Case(CP2, batch=6, steps=3, **IN_TURN, clip=0.5),
        "cp 2 x ep 2, halos and heads in turn, selective": Case(
            {**CP2, **EP2}, SELECTIVE, batch=6, steps=3, **IN_TURN, defer_sync=False
        ),
        "cp 2, halos, frozen keys and values": Case(
            CP2,
            FULL,
            batch=4,
            steps=2,
            **IN_TURN,
            frozen=("embed", "layers.0", "layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj", "layers.1.input"),
        ),
        "cp 2, halos, only sinks": Case(
            CP2,
            FULL,
            batch=4,
            steps=2,
            **IN_TURN,
            moe=QUIET,
            frozen=("proj", "embed", "norm", "gate", "experts", "lm_head"),
        ),
    },
    4: {
        "dp": Case(),
        "hsdp": Case(HSDP),
        "ep 4": Case({"expert": 4}),
        "ep 2 x fsdp 2": Case(EP2),
        "ep 2 x fsdp 2, accumulation 3": Case(EP2, batch=12),
        "hsdp x ep 2, accumulation 2": Case({"replicate": 2, "expert": 2}, batch=7, clip=0.5),
        "hsdp, accumulation 3, a rank short": Case(HSDP, batch=9),
        "three ranks without a row": Case({"expert": 4}, batch=1),
        "ranks without a valid token": Case(EP2, masked=True),
        "full activation checkpointing": Case(EP2, FULL, batch=8),
        "cp 2 x fsdp 2 x ep 4, accumulation 3": Case({**CP2, "expert": 4}, batch=6),
        "cp 4": Case({"context": 4}, batch=2),
        "cp 4 x ep 4, halos and heads in turn, full": Case(
            {"context": 4, "expert": 4}, FULL, batch=6, steps=2, **IN_TURN
        ),
        "cp 2 x hsdp 2 x ep 4, halos and heads in turn": Case(
            {**CP2, "replicate": 2, "expert": 4}, batch=5, steps=2, **IN_TURN
        ),
        "cp 4 x ep 2": Case({"context": 4, **EP2}, batch=2),
        "cp 2 x fsdp 2, accumulation 3, a rank short": Case(CP2, batch=5),
        "cp 2 x hsdp 2 x ep 2": Case({**CP2, **HSDP, **EP2}),
        "cp 2 x fsdp 2, a data rank without a row": Case({**CP2, **EP2}, batch=1),
        "cp 2 x fsdp 2, full activation checkpointing": Case({**CP2, **EP2}, FULL, batch=4),
    },
}

SLOW = {
    2: {
        *("dp, accumulation 3", "a rank without a row in its last micro-batch", "kept gathered, no prefetch"),
        *("frozen experts and embedding, sinks frozen", "sync at every micro-batch", "offloaded", "experts as a loop"),
        *("full activation checkpointing", "experts that no token chooses", "compiled"),
        *("cp 2, full activation checkpointing", "cp 2, selective activation checkpointing", "cp 2, frozen parts"),
        *("cp 2, halos and heads in turn", "cp 2 x ep 2, halos and heads in turn, selective"),
        *("cp 2, halos, frozen keys and values", "cp 2, halos, only sinks"),
        *("cp 2", "cp 2, micro-batches without a target", "cp 2, sync at every micro-batch"),
    },
    4: {
        *("dp", "hsdp", "ep 2 x fsdp 2", "hsdp, accumulation 3, a rank short", "ranks without a valid token"),
        *("full activation checkpointing", "cp 4", "cp 4 x ep 2", "cp 2 x fsdp 2, accumulation 3, a rank short"),
        *("cp 2 x hsdp 2 x ep 2", "cp 2 x fsdp 2, a data rank without a row"),
        *("cp 4 x ep 4, halos and heads in turn, full", "cp 2 x hsdp 2 x ep 4, halos and heads in turn"),
        "cp 2 x fsdp 2, full activation checkpointing",
    },
}


@cache
def outcomes(size: int, slow: bool) -> dict[str, list[Outcome]]:
    """By name, what each rank found."""
    cases = {name: case for name, case in CASES[size].items() if (name in SLOW[size]) == slow}
    of_ranks = run_ranks(size, several_processes, list(cases.values()), timeout=170)
    return dict(zip(cases, zip(*of_ranks, strict=True), strict=True))


def marks(size: int, *, slow: bool) -> list[pytest.MarkDecorator]:
    """One worker for all cases of a group of processes, which would otherwise run once in each."""
    group = pytest.mark.xdist_group(f"training-{size}-{slow}")
    return [group, pytest.mark.slow] if slow else [group]


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=marks(size, slow=name in SLOW[size]))
        for size, cases in CASES.items()
        for name in cases
    ],
)
def test_equals_one_process(size, name):
    expected = one_process(CASES[size][name])
    for outcome in outcomes(size, name in SLOW[size])[name]:
        assert_equal_training(outcome, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_long_and_tiny_documents_take_both_ways_of_sliding_layers(size: int) -> None:
    """What the cases with halos and heads in turn rely on."""
    data, place = long_and_tiny(), Place(context_ranks=size)
    steps = [batches(data, Case(batch=6), place) for _ in range(2)]
    ways = [halo_pays(batch.cu_seqlens.tolist(), 3, size) for step in steps for batch in step]
    assert set(ways) == {True, False}
