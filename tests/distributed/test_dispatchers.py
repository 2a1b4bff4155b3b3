"""Experts on several ranks equal experts on one: output, and the gradients of tokens, weights and experts."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_oracle import make_config
from ranks import run_ranks
from torch import Tensor

from automimo.errors import ConfigError
from automimo.moe import AllToAllDispatcher, DeepEPDispatcher, GroupedExperts

TOKENS = {2: [7, 12], 4: [5, 0, 9, 1]}  # of each rank
WIDTH, EXPERTS, CHOICES = 16, 8, 3


class StandInBuffer:
    """What the README of deep_ep documents of its Buffer, in plain collectives: tokens go once to each rank that has
    one of their experts; choices of other ranks arrive as -1; combine adds up over the ranks, without weights."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group, self.ranks, self.rank = group, group.size(), group.rank()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        def hint(hidden_bytes: int, ranks: int) -> int:
            assert ranks == num_ranks
            return hidden_bytes * 100

        return SimpleNamespace(get_nvl_buffer_size_hint=hint, get_rdma_buffer_size_hint=hint)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        self.local = num_experts // self.ranks
        in_rank = torch.stack([(topk_idx // self.local == r).any(1) for r in range(self.ranks)], 1)
        return in_rank.sum(0), None, torch.bincount(topk_idx.flatten(), minlength=num_experts), in_rank, None

    def dispatch(self, x: Tensor, handle: Any = None, **given: Any) -> tuple[Any, ...]:
        fresh = handle is None
        if fresh:
            tokens = [given["is_token_in_rank"][:, r].nonzero().squeeze(1) for r in range(self.ranks)]
            sent = torch.tensor([len(t) for t in tokens])
            got = torch.empty_like(sent)
            dist.all_to_all_single(got, sent, group=self.group)
            handle = (torch.cat(tokens), sent.tolist(), got.tolist(), x.shape[0])
        token, sent_list, got_list, _ = handle
        received = self._send(x.index_select(0, token), got_list, sent_list)
        if not fresh:
            return received, None, None, None, None, None
        index = self._send(given["topk_idx"].index_select(0, token), got_list, sent_list) - self.rank * self.local
        index = torch.where((index >= 0) & (index < self.local), index, -1)
        weights = self._send(given["topk_weights"].index_select(0, token), got_list, sent_list)
        weights = torch.where(index >= 0, weights, 0.0)
        counts = [int((index == e).sum()) for e in range(self.local)]
        return received, index, weights, counts, handle, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        token, sent, got, length = handle
        total = x.new_zeros(length, x.shape[1]).index_add(0, token, self._send(x, sent, got))
        if topk_weights is None:
            return total, None, None
        weights = self._send(topk_weights, sent, got)
        return total, weights.new_zeros(length, weights.shape[1]).index_add(0, token, weights), None

    def _send(self, x: Tensor, got: list[int], sent: list[int]) -> Tensor:
        out = x.new_empty(sum(got), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), got, sent, group=self.group)
        return out


def problem(rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of one rank with their choices, weights and the gradient of the output. No token of odd ranks chooses the
    last expert, and expert 2 is chosen by nobody."""
    generator = torch.Generator().manual_seed(10 * ranks + rank)
    tokens = TOKENS[ranks][rank]
    x, grad = torch.randn(2, tokens, WIDTH, generator=generator)
    allowed = torch.tensor([e for e in range(EXPERTS) if e != 2 and (rank % 2 == 0 or e != EXPERTS - 1)])
    draws = [allowed[torch.randperm(len(allowed), generator=generator)[:CHOICES]] for _ in range(tokens)]
    indices = torch.stack(draws) if draws else torch.empty(0, CHOICES, dtype=torch.int64)
    return x, indices, torch.rand(tokens, CHOICES, generator=generator), grad


def experts() -> GroupedExperts:
    torch.manual_seed(0)
    module = GroupedExperts(make_config(n_routed_experts=EXPERTS, n_activated_experts=CHOICES, dim=WIDTH))
    module.reset_parameters(0.3)
    return module


def run(module: GroupedExperts, rank: int, ranks: int) -> list[Tensor]:
    """Output and the gradients of tokens and weights."""
    x, indices, weights, grad = problem(rank, ranks)
    x.requires_grad_()
    weights.requires_grad_()
    out = module(x, weights, indices)
    out.backward(grad)
    assert x.grad is not None
    assert weights.grad is not None
    return [out.detach(), x.grad, weights.grad]


def on_ranks(rank: int, kind: str) -> tuple[list[Tensor], list[Tensor]]:
    ranks = dist.get_world_size()
    module = experts()
    share = EXPERTS // ranks
    for name, stack in list(module.named_parameters()):
        own = stack.data[rank * share : (rank + 1) * share].clone()
        module.register_parameter(name, torch.nn.Parameter(own))
    if kind == "torch":
        module.dispatcher = AllToAllDispatcher(EXPERTS, dist.group.WORLD)
    else:
        package = ModuleType("deep_ep")
        package.Buffer = StandInBuffer
        sys.modules["deep_ep"] = package
        module.dispatcher = DeepEPDispatcher(EXPERTS, dist.group.WORLD, WIDTH, torch.float32)
    results = run(module, rank, ranks)
    return results, [p.grad for p in module.parameters()]


@pytest.mark.parametrize("kind", ["torch", "deepep"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_rank(kind, ranks):
    answers = run_ranks(ranks, on_ranks, kind)
    module = experts()
    for rank, (found, _) in enumerate(answers):
        for ours, reference in zip(found, run(module, rank, ranks), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
    # The reference has seen the tokens of all ranks: its gradients are the sums.
    for number, parameter in enumerate(module.parameters()):
        whole = torch.cat([grads[number] for _, grads in answers])
        torch.testing.assert_close(whole, parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_missing_package_is_an_error_with_a_remedy():
    with pytest.raises(ConfigError, match=r"parallel.dispatcher: deepep needs .* deep_ep.*parallel.dispatcher=torch"):
        DeepEPDispatcher(EXPERTS, None, WIDTH, torch.float32)


def test_experts_that_cannot_be_shared():
    with pytest.raises(ConfigError, match="6 experts cannot be shared equally by 4 ranks"):
        AllToAllDispatcher(6, SimpleNamespace(size=lambda: 4))
