"""A model whose streams are shared by 2, 4 and 8 ranks: logits, loss and every gradient are those of one process.

No FSDP here, so that the ranks hold whole weights and a gradient of theirs is a part of a sum.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_text import VOCAB, WINDOW, tiny_config, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from toy import relative

from automimo.attention import KVCache
from automimo.attention.halo import halo_pays
from automimo.backend import BackendConfig
from automimo.data import Example
from automimo.data.batches import Batch, collate
from automimo.data.packing import Piece
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.moe import expert_load, moe_layers, set_aux_loss_scale
from automimo.training.evaluation import batch_loss
from automimo.training.place import Place


@dataclass(frozen=True)
class Documents:
    """lengths: of the documents before padding. model: changes of the tiny config."""

    lengths: tuple[int, ...]
    model: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"


def every_length(size: int) -> Documents:
    return Documents(tuple(range(1, 4 * size + 2)))


FLASH_HEADS = {  # the released numbers of key-value heads: 4 in full and 8 in sliding layers
    **{"num_attention_heads": 16, "num_key_value_heads": 4},
    **{"swa_num_attention_heads": 16, "swa_num_key_value_heads": 8},
}
CASES = {
    2: {
        "every length": every_length(2),
        "one giant document": Documents((301,)),
        "many tiny documents": Documents((1, 2, 1, 3, 1, 1, 2) * 9),
        "a window longer than a chunk": Documents((40, 9, 33), {"sliding_window": 30}),
        "a window longer than all documents": Documents((17, 5), {"sliding_window": 64}),
        "long and tiny": Documents((1, 150, 2, 41, 3)),
        "eager": Documents((7, 20, 1), attention="eager"),
        "one key-value head in sliding layers too": Documents((20, 6), {"swa_num_key_value_heads": 1}),
    },
    4: {
        "every length": every_length(4),
        "one giant document": Documents((303,)),
        "many tiny documents": Documents((1, 2, 1, 3, 1, 1, 2) * 9),
        "a window longer than a chunk": Documents((40, 9, 33), {"sliding_window": 30}),
    },
    8: {
        "4 and 8 key-value heads": Documents((70, 1, 33, 16), FLASH_HEADS),
        "every length": Documents(tuple(range(1, 34)), FLASH_HEADS),
        "halos": Documents((300, 1), {**FLASH_HEADS, "sliding_window": 3}),
    },
}


@dataclass
class Outcome:
    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    load: Tensor


def make_batch(case: Documents) -> Batch:
    rng = np.random.default_rng(0)
    examples = [
        Example(rng.integers(0, VOCAB, n).astype(np.int32), rng.random(n) < 0.8, f"doc:{i}")
        for i, n in enumerate(case.lengths)
    ]
    return collate(examples, [[Piece(i, 0, n) for i, n in enumerate(case.lengths)]])


def make_model(case: Documents) -> MiMoV2FlashForCausalLM:
    moe = {"gate_bias_update_factor": 0.01, "aux_loss_coeff": 0.02}
    model = tiny_model(tiny_config(**case.model), moe=moe, backend=BackendConfig(attn=case.attention))
    with torch.no_grad():
        for layer in moe_layers(model).values():
            layer.gate.weight *= 20  # scores far apart: no near-ties that rounding decides
    set_aux_loss_scale(model, 0.7)
    return model


def compute(model: MiMoV2FlashForCausalLM, batch: Batch) -> Outcome:
    with torch.no_grad():
        # One row and no positions: both are other ways to the same stream.
        logits = model.eval()(
            batch.input_ids[None], cu_seqlens=batch.cu_seqlens,
            padding_mask=batch.padding_mask, cp_size=batch.cp_size, cp_rank=batch.cp_rank,
        ).logits[0]  # fmt: skip
    loss = batch_loss(model.train(), batch, loss_chunk=16)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(logits, loss.detach(), gradients, expert_load(model))


def on_ranks(rank: int, cases: list[Documents]) -> list[tuple[Outcome, Batch]]:
    """The rank's logits; loss, gradients and counts summed over all."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    results = []
    for case in cases:
        model = make_model(case)
        for block in model.model.layers.values():
            block.self_attn.setup_cp_attention(mesh)
        batch = Place(context_rank=rank, context_ranks=size).tokens_of(make_batch(case))
        outcome = compute(model, batch)
        for tensor in (outcome.loss, outcome.load, *outcome.gradients.values()):
            dist.all_reduce(tensor)
        results.append((outcome, batch))
    return results


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_logits_loss_and_gradients_are_those_of_one_process(size: int) -> None:
    of_ranks = run_ranks(size, on_ranks, list(CASES[size].values()), timeout=170)
    for number, (name, case) in enumerate(CASES[size].items()):
        expected = compute(make_model(case), make_batch(case))
        shares = [results[number] for results in of_ranks]
        assert_same(name, size, expected, case, shares)


def assert_same(name: str, size: int, expected: Outcome, case: Documents, shares: list[tuple[Outcome, Batch]]) -> None:
    seen = 0
    for rank, (outcome, batch) in enumerate(shares):
        rows, places = real_rows(case.lengths, size, rank)
        seen += len(rows)
        assert batch.tokens == len(rows)
        torch.testing.assert_close(outcome.logits[rows], expected.logits[places], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outcome.loss, expected.loss, rtol=1e-5, atol=0)
        assert torch.equal(outcome.load, expected.load), name
        assert outcome.gradients.keys() == expected.gradients.keys()
        wrong = {n: relative(outcome.gradients[n], g) for n, g in expected.gradients.items()}
        wrong = {n: error for n, error in wrong.items() if error > 1e-5}
        assert not wrong, f"{name}, rank {rank}: {wrong}"
    assert seen == sum(case.lengths)
    assert "model.layers.1.self_attn.attention_sink_bias" in expected.gradients
    assert all(gradient.any() for gradient in expected.gradients.values())


def real_rows(lengths: tuple[int, ...], size: int, rank: int) -> tuple[list[int], list[int]]:
    """Token by token from the rule's words: which rows of the rank are no padding, and their places in the unpadded
    stream."""
    rows, places, row, before = [], [], 0, 0
    for length in lengths:
        padded = length
        while padded % (2 * size):
            padded += 1
        chunk = padded // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            for place in range(number * chunk, (number + 1) * chunk):
                if place < length:
                    rows.append(row)
                    places.append(before + place)
                row += 1
        before += length
    return rows, places


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"cp_size": 2}, "cp_size is 2, but 1 ranks share"),
        ({"cp_size": 1, "cp_rank": 1}, "cp_rank is 1, but there are 1"),
    ],
)
def test_a_batch_that_was_cut_for_other_ranks_is_refused(batch: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model()(torch.zeros(4, dtype=torch.int64), cu_seqlens=torch.tensor([0, 4]), **batch)


@pytest.mark.parametrize(
    ("size", "name", "pays"),
    [(2, "one giant document", True), (4, "one giant document", True), (8, "halos", True), (8, "every length", False)],
)
def test_both_ways_of_sliding_layers_are_among_the_cases(size: int, name: str, pays: bool) -> None:
    case = CASES[size][name]
    batch = Place(context_ranks=size).tokens_of(make_batch(case))
    assert halo_pays(batch.cu_seqlens.tolist(), case.model.get("sliding_window", WINDOW), size) == pays


def refusals(rank: int) -> list[str]:
    model = tiny_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    messages = []
    with pytest.raises(ValueError, match="both query and key/value") as caught:
        model.model.layers["0"].self_attn.setup_cp_attention(mesh)  # 4 heads, 3 ranks
    messages.append(str(caught.value))
    return messages


def test_heads_that_do_not_divide_are_refused_with_the_numbers() -> None:
    (message,) = run_ranks(3, refusals)[0]
    assert "over 3 ranks" in message
    assert "the layer has 4 and 1: parallel.context may be one of [1, 2, 4]" in message


def unfit_batches(rank: int) -> list[str]:
    model = tiny_model()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    for block in model.model.layers.values():
        block.self_attn.setup_cp_attention(mesh)
    ids, shared = torch.zeros(4, dtype=torch.int64), {"cp_size": 2, "cp_rank": rank}
    messages = []
    for tokens, batch in (
        (ids, {"cu_seqlens": torch.tensor([0, 4])}),
        (ids[None], shared),
        (ids, {"cu_seqlens": torch.tensor([0, 6, 8]), **shared}),
        (ids, {"cu_seqlens": torch.tensor([0, 4]), **shared}),
        (ids, {"cu_seqlens": torch.tensor([0, 8]), "cache": KVCache(4), **shared}),
    ):
        with pytest.raises(ValueError) as caught:
            model(tokens, **batch)
        messages.append(str(caught.value))
    return messages


def test_streams_that_do_not_fit_the_ranks_are_refused_with_the_numbers() -> None:
    uncut, padded, indivisible, short, cached = run_ranks(2, unfit_batches)[1]
    assert "cp_size is 1, but 2 ranks share the streams of this model" in uncut
    assert "needs a packed (thd) stream" in padded
    assert "document 0 has 6 tokens, which is not divisible by 2 * cp_size = 4" in indivisible
    assert "cu_seqlens end at 4 but the stream has 4 tokens on each of 2 ranks" in short
    assert "a cache needs whole streams, but 2 ranks share" in cached
