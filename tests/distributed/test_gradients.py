"""The global norm, clipping and the sum of replicated gradients, over plain and sharded parameters together."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from automimo.distributed.gradients import clip_gradients, gradient_norm, sum_replicated_gradients
from automimo.distributed.world import sum_numbers

SHAPES = {"plain": (3,), "dense": (7, 3), "hsdp": (5, 2), "experts": (4, 6, 2), "empty": (2, 3), "unused": (2,)}


def gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("values", [5_000_000, 65_537, 65_536])
def test_the_norm_of_a_large_gradient_is_right(values: int) -> None:
    """torch's own fp32 norm is off by 9e-5 for 4 M values on a CPU."""
    parameter = nn.Parameter(torch.zeros(values))
    parameter.grad = torch.randn(values, generator=torch.Generator().manual_seed(0))
    assert gradient_norm([parameter]) == pytest.approx(float(parameter.grad.double().norm()), rel=1e-6)


def parameters() -> dict[str, nn.Parameter]:
    """Of this rank: 4 ranks, dense over all of them (7 rows: unevenly; 2 rows: two ranks have none)."""
    dense = init_device_mesh("cpu", (4,))
    two = init_device_mesh("cpu", (2, 2))
    places = {
        "dense": (dense, [Shard(0)]),
        "hsdp": (two, [Replicate(), Shard(0)]),
        "experts": (two, [Shard(1), Shard(0)]),
        "empty": (dense, [Shard(0)]),
    }
    result = {}
    for name, grad in gradients().items():
        mine = distribute_tensor(grad, *places[name]) if name in places else grad
        parameter = nn.Parameter(torch.zeros_like(mine))
        parameter.grad = None if name == "unused" else mine
        result[name] = parameter
    return result


def norm_and_clip(rank: int) -> tuple[float, dict[str, Tensor], float]:
    mine = parameters()
    norm = gradient_norm(mine.values())
    clip_gradients(mine.values(), 0.25 * norm, norm)
    clipped = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in mine.items()}
    return norm, clipped, gradient_norm(mine.values())


def test_every_value_counts_once():
    reference = {name: grad for name, grad in gradients().items() if name != "unused"}
    expected = float(torch.cat([grad.flatten().double() for grad in reference.values()]).norm())
    answers = run_ranks(4, norm_and_clip)
    assert len({norm for norm, _, _ in answers}) == 1, "every rank must clip with the same number"
    for norm, clipped, again in answers:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert again == pytest.approx(0.25 * expected, rel=1e-5)
        for name, grad in reference.items():
            torch.testing.assert_close(clipped[name], grad * 0.25, rtol=1e-5, atol=0)


def test_one_process_agrees_with_torch():
    plain = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    for parameter, grad in zip(plain, gradients().values(), strict=True):
        parameter.grad = grad
    norm = gradient_norm(plain)
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm([p.grad for p in plain])), rel=1e-6)
    theirs = [nn.Parameter(torch.zeros_like(p)) for p in plain]
    for parameter, grad in zip(theirs, gradients().values(), strict=True):
        parameter.grad = grad
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    clip_gradients(plain, 0.5, norm)
    for mine, reference in zip(plain, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-6, atol=0)
    before = [p.grad.clone() for p in plain]
    clip_gradients(plain, 2 * norm, norm)
    assert all(torch.equal(p.grad, b) for p, b in zip(plain, before, strict=True)), "below the limit nothing changes"


def replicated(rank: int) -> list[Tensor | None]:
    mine = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    mine[0].grad = torch.full((3,), float(rank + 1))
    if rank == 2:
        mine[1].grad = torch.ones(2, 2)
    sharded = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (4,)), [Shard(0)]))
    sum_replicated_gradients([*mine, sharded])
    assert sharded.grad is None
    assert sum_numbers([1]) == [dist.get_world_size()]
    return [p.grad for p in mine]


def test_replicated_gradients_are_summed_and_unused_ones_stay_absent():
    for first, second, third in run_ranks(4, replicated):
        assert torch.equal(first, torch.full((3,), 10.0))
        assert torch.equal(second, torch.ones(2, 2))
        assert third is None
