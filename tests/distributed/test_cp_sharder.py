"""ContextParallelSharder on real ranks: shares and back, gradients through the gather, the model's own strategy."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cp_oracle import ROWS, Rows, share_of
from ranks import RankFailedError, run_ranks
from tiny_text import VOCAB, tiny_config, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from automimo.distributed.context import ContextParallelSharder, ShardLayout, zigzag_indices
from automimo.errors import ConfigError
from automimo.mimo_v2_flash.parallelization import ensure_mimo_te_context_parallel

SIZES = [2, 4]
TOKENS = 96  # of ROWS


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def packed(size: int) -> tuple[ContextParallelSharder, dict[str, Any]]:
    made = ContextParallelSharder(None, init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)), ROWS.batch())
    return made, made.shard(ROWS.batch())[1]


def round_trips(rank: int, size: int) -> None:
    made, shared = packed(size)
    share = share_of(ROWS.places(0, 1), size, rank)
    assert made.layout is not None
    assert made.layout.local_token_global_indices.tolist() == share
    for key in ("input_ids", "labels", "position_ids", "padding_mask"):
        whole = ROWS.stream(key, 0, 1)
        assert shared[key].tolist() == [whole[place] for place in share]
        assert made.gather_token_tensor(shared[key], seq_dim=0).tolist() == whole
        assert torch.equal(
            made.gather_token_tensor(shared[key], seq_dim=0, trim=True), ROWS.table(key).to(whole_dtype(key))
        )
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8):
        logits = (50 * values(1, TOKENS, 5)).abs().to(dtype)
        part = made.shard_token_tensor(logits.squeeze(0), seq_dim=0).unsqueeze(0)
        assert torch.equal(part, logits[:, share])
        back = made.gather_token_tensor(part)
        assert torch.equal(back, logits)
        assert back.dtype == dtype
        last = made.gather_token_tensor(part.transpose(1, 2), seq_dim=-1)
        assert torch.equal(last, logits.transpose(1, 2))

    # Nothing of the order of one batch is left for the next, which is as long.
    other = Rows(ROWS.documents[::-1])
    made.shard(other.batch())
    share = share_of(other.places(0, 1), size, rank)
    assert made.gather_token_tensor(torch.tensor(share), seq_dim=0).tolist() == list(range(TOKENS))


def whole_dtype(key: str) -> torch.dtype:
    return torch.bool if key == "padding_mask" else torch.int64


@pytest.mark.parametrize("size", SIZES)
def test_shares_and_back(size: int) -> None:
    run_ranks(size, round_trips, size)


def gradients(rank: int, size: int) -> None:
    made, _ = packed(size)
    share = share_of(ROWS.places(0, 1), size, rank)
    whole = values(TOKENS, 3, seed=1)
    weights = [values(TOKENS, 3, seed=2 + r) for r in range(size)]

    # Every rank has a term of its own of the loss: sum over r of sum(w_r * x ** 3).
    mine = whole[share].requires_grad_()
    (weights[rank] * made.gather_token_tensor(mine, seq_dim=0) ** 3).sum().backward()
    reference = whole.clone().requires_grad_()
    sum((w * reference**3).sum() for w in weights).backward()
    torch.testing.assert_close(mine.grad, reference.grad[share], rtol=1e-12, atol=1e-12)

    # All ranks compute the same loss: it counts once when each takes its part of it, or when one rank has it.
    for scale in (1 / size, float(rank == size - 1)):
        mine = whole[share].requires_grad_()
        (scale * weights[0] * made.gather_token_tensor(mine, seq_dim=0) ** 3).sum().backward()
        torch.testing.assert_close(mine.grad, (3 * weights[0] * whole**2)[share], rtol=1e-12, atol=1e-12)

    # Tokens of rows, and there and back again: from a whole that is alike on all ranks every share is one term.
    rows = whole.view(4, 24, 3).clone().requires_grad_()
    part = made.shard_token_tensor(rows)
    (weights[0] * made.gather_token_tensor(part, seq_dim=0)).sum().backward()
    expected = torch.zeros(TOKENS, 3, dtype=torch.float64)
    expected[share] = size * weights[0][share]
    torch.testing.assert_close(rows.grad.view(TOKENS, 3), expected, rtol=1e-12, atol=1e-12)

    # Along another dimension, trimmed to rows.
    mine = whole[share].T.contiguous().requires_grad_()
    trimmed = made.gather_token_tensor(mine, trim=True)
    assert trimmed.shape == (3, 4, 24)
    (trimmed.flatten(1).T * weights[rank]).sum().backward()
    torch.testing.assert_close(mine.grad.T, sum(weights)[share], rtol=1e-12, atol=1e-12)

    # In bf16 they are rounded once. One by one each 2 ** -9 would be lost beside 1, where steps are 2 ** -7:
    # 1 + 3 * 2 ** -9 is rounded up, 1 + 2 ** -9 down.
    mine = torch.zeros(TOKENS // size, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((TOKENS,), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    (weight * made.gather_token_tensor(mine, seq_dim=0)).sum().backward()
    assert torch.equal(mine.grad.float(), torch.full((TOKENS // size,), 1 + 2.0**-7 if size == 4 else 1.0))


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_sums_over_ranks(size: int) -> None:
    run_ranks(size, gradients, size)


def part_of_a_mesh(rank: int) -> list[int]:
    """cp of a mesh with data ranks and one that is tensor parallel in name."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp"))
    made = ContextParallelSharder(None, mesh, ROWS.batch())
    assert made.tp_mesh.size() == 1
    made.shard(ROWS.batch())
    share = share_of(ROWS.places(0, 1), 2, rank % 2)
    assert made.layout.local_token_global_indices.tolist() == share
    replica = rank // 2
    own = torch.tensor(share) + 1000 * replica
    assert made.gather_token_tensor(own, seq_dim=0).tolist() == [1000 * replica + place for place in range(TOKENS)]
    without = ContextParallelSharder(None, mesh["dp"], ROWS.batch())
    assert without.cp_mesh is None
    return share


def test_only_the_context_ranks_share() -> None:
    shares = run_ranks(4, part_of_a_mesh)
    assert shares[0] == shares[2] != shares[1] == shares[3]


def other_strategies(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    by_length = ContextParallelSharder(
        device_mesh=mesh, shard_batch=partial(report, None), local_token_global_indices=zigzag_indices
    )
    for length in (8 * size, 2 * size):  # nothing is remembered from the first
        x = values(2, length, 3)
        part = by_length.shard_token_tensor(x)
        assert torch.equal(part, x[:, share_of([length], size, rank)])
        assert torch.equal(by_length.gather_token_tensor(part), x)

    padded = ContextParallelSharder(
        device_mesh=mesh,
        shard_batch=partial(report, None),
        layout=ShardLayout(
            zigzag_indices(4 * size, size, rank), original_seq_len=4 * size - 3, padded_seq_len=4 * size
        ),
    )
    x = values(2, 4 * size - 3)
    part = padded.shard_token_tensor(x, fill=9.0)
    whole = padded.gather_token_tensor(part)
    assert torch.equal(whole, torch.cat([x, torch.full((2, 3), 9.0, dtype=torch.float64)], 1))
    assert torch.equal(padded.gather_token_tensor(part, trim=True), x)

    same = ContextParallelSharder(
        device_mesh=mesh, shard_batch=partial(report, None), layout=ShardLayout(torch.arange(3))
    )
    with pytest.raises(ConfigError, match=f"shares of {size} ranks are not exactly the {3 * size} places"):
        same.gather_token_tensor(torch.zeros(3), seq_dim=0)


def report(layout: ShardLayout | None, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("no batch is cut here")


@pytest.mark.parametrize("size", SIZES)
def test_strategies_by_length_and_fixed_layouts(size: int) -> None:
    run_ranks(size, other_strategies, size)


def lost_rank(rank: int, size: int) -> None:
    made, _ = packed(size)
    mine = torch.ones(TOKENS // size + rank, dtype=torch.float64)
    made.gather_token_tensor(mine[: TOKENS // size], seq_dim=0)  # all ranks agree on the order first
    made.gather_token_tensor(mine if rank == 1 else mine[: TOKENS // size], seq_dim=0)


def test_a_share_of_another_length_is_an_error_and_no_wrong_answer() -> None:
    with pytest.raises(RankFailedError, match="49 tokens along dimension 0, but this rank has 48"):
        run_ranks(2, lost_rank, 2, timeout=20)


MODEL_ROWS = Rows([[(5, 8), (16, 16)], [(1, 8), (13, 16)]])


def model_batch() -> dict[str, Any]:
    batch = MODEL_ROWS.batch()
    batch["input_ids"] %= VOCAB
    batch["targets"] = torch.where(batch.pop("labels") == -100, -100, (batch["input_ids"] * 7 + 1) % VOCAB)
    return batch


def sharing_model(rank: int, size: int, chunks: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, summed over the ranks, and that the whole logits are right on every rank."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    model = tiny_model(tiny_config(num_key_value_heads=4, swa_num_key_value_heads=4))
    sharder = ContextParallelSharder(model, mesh, model_batch(), num_chunks=chunks)
    loss = torch.zeros(())
    context, shared = sharder.shard(model_batch())
    contexts = [block.self_attn.context for block in model.model.layers.values()]
    assert all(shared_by is not None for shared_by in contexts)
    sharder.shard(model_batch())
    ensure_mimo_te_context_parallel(model, mesh["cp"])
    assert all(block.self_attn.context is c for block, c in zip(model.model.layers.values(), contexts, strict=True))
    targets = shared.pop("targets")
    with context():
        for chunk in range(chunks):
            # As a pipeline cuts arguments: tensors along the first dimension, everything else as it is.
            inputs = shared
            if chunks > 1:
                inputs = {k: v[chunk : chunk + 1] if isinstance(v, Tensor) else v for k, v in shared.items()}
            loss = loss + model(**inputs, targets=targets if chunks == 1 else targets[chunk]).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for tensor in (total := loss.detach().clone(), *gradients.values()):
        dist.all_reduce(tensor)
    return total, gradients


@pytest.mark.parametrize(("size", "chunks"), [(2, 1), (2, 2), (4, 1)])
def test_a_model_on_shares_equals_one_process(size: int, chunks: int) -> None:
    model = tiny_model(tiny_config(num_key_value_heads=4, swa_num_key_value_heads=4))
    batch, loss = model_batch(), torch.zeros(())
    for row, documents in enumerate(MODEL_ROWS.documents):
        start = 0
        for real, places in documents:
            part = slice(start, start + real)
            loss = (
                loss
                + model(batch["input_ids"][row : row + 1, part], targets=batch["targets"][row : row + 1, part]).loss
            )
            start += places
    loss.backward()
    reference = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for total, gradients in run_ranks(size, sharing_model, size, chunks):
        torch.testing.assert_close(total, loss.detach(), rtol=1e-5, atol=0)
        assert gradients.keys() == reference.keys()
        for name, gradient in gradients.items():
            difference = (gradient - reference[name]).norm() / reference[name].norm().clamp(min=1e-30)
            assert difference < 1e-5, f"{name}: {difference:.2e}"
