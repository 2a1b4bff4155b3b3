"""Training in 2 and 4 processes equals training in one: loss and every gradient at every step, weights, bias, counts.

The cases of one number of processes run one after the other in the same processes, which saves starting them.
"""

from functools import cache

import pytest
from ranks import run_ranks
from toy import Case, Outcome, assert_equal_training, one_process, several_processes

from automimo.parallelize import ParallelConfig

EP2, HSDP = {"expert": 2}, {"replicate": 2}
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
    },
}


@cache
def outcomes(size: int) -> list[list[Outcome]]:
    return run_ranks(size, several_processes, list(CASES[size].values()), timeout=170)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in CASES.items() for name in cases])
def test_equals_one_process(size, name):
    number = list(CASES[size]).index(name)
    expected = one_process(CASES[size][name])
    for of_rank in outcomes(size):
        assert_equal_training(of_rank[number], expected)
