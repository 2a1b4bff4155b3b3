"""Sliding attention over ranks that exchange halos equals `attend` of the whole stream in one process."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attention_oracle import bounds, forward_backward, random_inputs, relative_error
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from automimo.attention import build_layout
from automimo.attention.halo import halo_attention, plan_halo
from automimo.distributed.context.partition import thd_partition
from automimo.errors import ConfigError
from automimo.moe.recompute import router_frozen_contexts, selective_contexts

SCALE = 0.4
CONTEXTS = {"all": router_frozen_contexts, "received kept": selective_contexts}


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    window: int
    heads: int = 4
    kv_heads: int = 2
    sink: bool = True
    backend: str = "sdpa"
    dtype: torch.dtype = torch.float32
    recompute: str | None = None

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        return random_inputs(
            sum(self.lengths), heads=self.heads, kv_heads=self.kv_heads, sink=self.sink, dtype=self.dtype
        )


def share_of(rank: int, size: int, case: Case) -> dict[str, Tensor]:
    """out, dq, dk, dv of the rank's rows and its part of dsink."""
    boundaries = bounds(case.lengths)
    plan = plan_halo(boundaries, case.window, size, rank)
    rows = thd_partition(boundaries, size, rank)
    q, k, v, sink, dout = case.inputs()
    leaves = {name: x[rows].requires_grad_() for name, x in {"q": q, "k": k, "v": v}.items()}
    if sink is not None:
        leaves["sink"] = sink.requires_grad_()
    attention = partial(
        halo_attention,
        plan=plan,
        group=dist.group.WORLD,
        scale=SCALE,
        window=case.window,
        backend=case.backend,
    )
    given = (leaves["q"], leaves["k"], leaves["v"], leaves.get("sink"))
    if case.recompute is None:
        out = attention(*given)
    else:
        out = checkpoint(attention, *given, use_reentrant=False, context_fn=CONTEXTS[case.recompute])
    out.backward(dout[rows])
    return {"out": out.detach()} | {f"d{name}": x.grad for name, x in leaves.items()}


def shares_of(rank: int, size: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    return [share_of(rank, size, case) for case in cases]


def over_ranks(size: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    """For each case the results of all ranks in the order of the stream, the gradients of the sinks added up."""
    by_rank = run_ranks(size, shares_of, size, cases)
    results = []
    for number, case in enumerate(cases):
        parts = [shares[number] for shares in by_rank]
        rows = torch.cat([thd_partition(bounds(case.lengths), size, rank) for rank in range(size)])
        whole = {name: torch.cat([part[name] for part in parts]) for name in ("out", "dq", "dk", "dv")}
        result = {name: torch.empty_like(x).index_copy_(0, rows, x) for name, x in whole.items()}
        if case.sink:
            result["dsink"] = torch.stack([part["dsink"] for part in parts]).sum(0)
        results.append(result)
    return results


def in_one_process(case: Case) -> dict[str, Tensor]:
    layout = build_layout(bounds(case.lengths), window=case.window)
    return forward_backward(*case.inputs(), layout=layout, window=case.window, backend=case.backend, scale=SCALE)


def check(size: int, cases: list[Case]) -> None:
    for case, result in zip(cases, over_ranks(size, cases), strict=True):
        expected = in_one_process(case)
        assert result.keys() == expected.keys()
        for name, want in expected.items():
            # Values are of order 1; entries near 0 are sums of such, hence the absolute part.
            torch.testing.assert_close(
                result[name], want, rtol=1e-5, atol=2e-6, msg=lambda text, n=name, c=case: f"{n} of {c}: {text}"
            )


def typical_cases(size: int) -> list[Case]:
    least = 2 * size
    every = (least, 2 * least, 3 * least)
    windows = (1, 2, 3, size + 1, 2 * least, 3 * least + 5)
    return [
        *(Case(every, window) for window in windows),
        *(Case((length,), window) for length in every for window in (2, least - 1)),
        Case((least,) * 20, 7),
        Case((least,) * 20, 1),  # nobody receives anything
        Case((40 * least,), 11),
        Case((3 * least, least, 9 * least, 2 * least), 13, heads=8, kv_heads=1),
        Case((3 * least, least, 9 * least, 2 * least), 13, heads=3, kv_heads=3, sink=False),
        Case((3 * least, least, 9 * least, 2 * least), 3 * least + 1, backend="eager"),
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_equals_one_process(size: int) -> None:
    check(size, typical_cases(size))


def test_window_of_the_long_kind() -> None:
    check(2, [Case((1200, 4), 300)])  # from 257 on a layout has other tiles


def test_eight_ranks() -> None:
    check(8, [Case((16, 48, 32), 5), Case((16, 16), 20), Case((160,), 21, heads=8, kv_heads=4)])


def test_recomputed_in_backward() -> None:
    case = Case((24, 8, 40), 6)
    plain, *recomputed = over_ranks(2, [case, *(replace(case, recompute=name) for name in CONTEXTS)])
    for result in recomputed:
        for name, want in plain.items():
            assert torch.equal(result[name], want), name


def test_gradients_do_not_vary_from_run_to_run() -> None:
    case = Case((48, 16, 80), 30)  # rows go to up to three ranks
    first, second = over_ranks(4, [case, case])
    for name, want in first.items():
        assert torch.equal(second[name], want), name


def test_bf16() -> None:
    case = Case((48, 16, 80), 30, dtype=torch.bfloat16)
    expected = in_one_process(replace(case, dtype=torch.float32))
    one, over = in_one_process(case), over_ranks(4, [case])[0]
    for name, want in expected.items():
        # As exact as bf16 in one process; gradients of keys are rounded once more for every rank they come from.
        assert over[name].dtype == one[name].dtype
        assert relative_error(over[name], want) <= 2 * relative_error(one[name], want) + 1e-6, name


def raised(rank: int, size: int) -> list[str]:
    """What each misuse raises; no rank gets as far as the exchange."""
    boundaries = [0, 16]
    plan = plan_halo(boundaries, 4, size, rank)
    q, k, v, sink, _ = random_inputs(plan.rows)
    call = partial(halo_attention, q, k, v, sink, group=dist.group.WORLD, scale=SCALE, backend="sdpa")
    wrong: list[partial[Any]] = [
        partial(call, plan=plan, window=5),
        partial(call, plan=plan_halo(boundaries, 4, size, 1 - rank), window=4),
        partial(call, plan=plan_halo(boundaries, 4, 4, rank), window=4),
        partial(halo_attention, q[1:], k, v, sink, plan, dist.group.WORLD, scale=SCALE, window=4, backend="sdpa"),
        partial(call, plan=plan, window=4, backend="flash"),
    ]
    texts = []
    for misuse in wrong:
        with pytest.raises(ConfigError) as error:
            misuse()
        texts.append(str(error.value))
    return texts


def test_errors() -> None:
    for rank, texts in enumerate(run_ranks(2, raised, 2)):
        window, other_rank, other_size, shape, backend = texts
        assert "window 5" in window and "planned for window 4" in window
        assert f"planned for rank {1 - rank} of 2 and used by rank {rank} of 2" in other_rank
        assert "do not have the 4 tokens" in other_size  # a quarter of the stream
        assert "do not have the 8 tokens" in shape
        assert "'flash' is not available" in backend
