"""One optimizer step on a small stand-in model: normalisation, skipping, stopping; evaluation."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ragged_examples import ragged_examples
from torch import nn
from torch.nn import functional as F

from automimo.backend import BackendConfig
from automimo.data import DataStream
from automimo.errors import TrainingError
from automimo.moe import Documents, MoE, MoEConfig, MoEFSDPSyncMixin, attach_aux_loss
from automimo.training.evaluation import evaluate
from automimo.training.optimizer import make_optimizer
from automimo.training.precision import MasterWeights
from automimo.training.recipe import OptimSection
from automimo.training.step import train_step

VOCABULARY = 17


class StandIn(nn.Module, MoEFSDPSyncMixin):
    """The forward interface of the model on a bag of words: previous tokens of the document predict the next."""

    def __init__(self, aux_loss: float = 0.0, bias_speed: float = 0.0) -> None:
        super().__init__()
        self.backend = BackendConfig()
        self.embed = nn.Embedding(VOCABULARY, 8)
        config = MoEConfig(
            n_routed_experts=4,
            n_shared_experts=None,
            n_activated_experts=2,
            n_expert_groups=1,
            n_limited_groups=1,
            train_gate=True,
            gate_bias_update_factor=bias_speed,
            aux_loss_coeff=aux_loss,
            score_func="sigmoid_with_bias",
            route_scale=None,
            dim=8,
            inter_dim=8,
            moe_inter_dim=8,
            norm_topk_prob=True,
            dtype="float32",
        )
        self.moe = MoE(config, "torch")
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(
        self, input_ids, *, position_ids, cu_seqlens, padding_mask, cp_size, cp_rank, qkv_format, targets, loss_chunk
    ):
        assert (cp_size, cp_rank) == (1, 0)
        assert qkv_format == "thd" and loss_chunk == 5 and padding_mask is None
        x = self.embed(input_ids)
        documents = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff().long())
        y, stats = self.moe(x, documents=Documents(documents, len(cu_seqlens) - 1))
        if self.training:
            self.moe.gate.record(stats)
            y = attach_aux_loss(y, stats.aux_loss, self.moe.aux_loss_scale)
        logits = self.head(x + y)
        return SimpleNamespace(loss=F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))


def ragged_stream(count: int = 23, row: int = 12, seed: int = 0) -> DataStream:
    """Documents of 2 to `row` tokens with a random share of targets."""
    return DataStream(ragged_examples(VOCABULARY, count, row, seed), sequence_length=row, epochs=1)


def make(aux_loss: float = 0.0, bias_speed: float = 0.0, dtype: torch.dtype = torch.float32):
    torch.manual_seed(3)
    model = StandIn(aux_loss, bias_speed).to(dtype)
    masters = MasterWeights(model, dtype)
    optimizer = make_optimizer(masters.trainable, OptimSection(lr=0.01))
    return model, masters, optimizer


def step(parts, batches, *, clip_norm=None, update_bias=False, number=1):
    model, masters, optimizer = parts
    return train_step(
        model,
        masters,
        optimizer,
        batches,
        lr_factor=1.0,
        clip_norm=clip_norm,
        loss_chunk=5,
        update_bias=update_bias,
        step=number,
    )


def gradients_of(batches, aux_loss: float) -> dict[str, torch.Tensor]:
    parts = make(aux_loss, dtype=torch.float64)
    step(parts, batches)
    return {name: parameter.grad.clone() for name, parameter in parts[0].named_parameters()}


@pytest.mark.parametrize("aux_loss", [0.0, 0.5])
@pytest.mark.parametrize("rows_per_batch", [1, 2, 3, 5])
def test_accumulation_equals_one_batch(rows_per_batch: int, aux_loss: float):
    """Micro-batches of unequal tokens and targets, their number not dividing the rows, against one batch of all."""
    stream = ragged_stream()
    rows = stream.next_rows(11)
    assert len(rows) == 11 and len({sum(p.stop - p.start for p in row) for row in rows}) > 1
    whole = gradients_of([stream.batch(rows)], aux_loss)
    cut = [stream.batch(rows[i : i + rows_per_batch]) for i in range(0, 11, rows_per_batch)]
    assert len({batch.valid_targets / batch.tokens for batch in cut}) > 1
    for name, gradient in gradients_of(cut, aux_loss).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-6, atol=1e-12, msg=name)
    if aux_loss:
        without = gradients_of([stream.batch(rows)], 0.0)
        assert not torch.allclose(without["moe.gate.weight"], whole["moe.gate.weight"], rtol=1e-3)


def test_gradients_against_the_definition():
    """d/dw of (sum of all token losses / their number), written without batches."""
    stream = ragged_stream()
    rows = stream.next_rows(4)
    cut = [stream.batch(rows[:1]), stream.batch(rows[1:])]
    found = gradients_of(cut, 0.0)
    model = make(dtype=torch.float64)[0]
    losses = []
    for row in rows:
        for piece in row:
            example = stream.examples[piece.example]
            ids = torch.from_numpy(example.input_ids.astype(np.int64))
            x = model.embed(ids)
            logits = model.head(x + model.moe(x)[0]).log_softmax(-1)
            losses += [-logits[t, ids[t + 1]] for t in range(len(ids) - 1) if example.target_mask[t + 1]]
    mean = torch.stack(losses).mean()
    mean.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
    result = step(make(dtype=torch.float64), cut)
    assert result.loss == pytest.approx(mean.item(), rel=1e-6)


def test_norm_and_clipping():
    stream = ragged_stream()
    batches = [stream.batch(stream.next_rows(3))]
    parts = make()
    free = step(parts, batches)
    expected = math.sqrt(sum(p.grad.square().sum().item() for p in parts[0].parameters()))
    assert free.grad_norm == pytest.approx(expected, rel=1e-5)
    parts = make()
    clipped = step(parts, batches, clip_norm=free.grad_norm / 4)
    assert clipped.grad_norm == free.grad_norm
    after = math.sqrt(sum(p.grad.square().sum().item() for p in parts[0].parameters()))
    assert after == pytest.approx(expected / 4, rel=1e-4)


def test_a_step_without_targets_is_skipped():
    stream = ragged_stream()
    batch = stream.batch(stream.next_rows(2))
    empty = type(batch)(
        batch.input_ids,
        torch.full_like(batch.targets, -100),
        batch.position_ids,
        batch.cu_seqlens,
        0,
        batch.tokens,
        batch.origins,
    )
    parts = make(bias_speed=0.1)
    before = {name: value.clone() for name, value in parts[0].state_dict().items()}
    result = step(parts, [empty, empty], update_bias=True)
    assert result.loss is None and result.grad_norm is None
    assert all(torch.equal(before[name], value) for name, value in parts[0].state_dict().items())
    # one empty micro-batch beside a full one changes nothing about the mean
    with_empty, alone = make(), make()
    assert step(with_empty, [batch, empty]).loss == step(alone, [batch]).loss
    for name, parameter in with_empty[0].named_parameters():
        torch.testing.assert_close(parameter, alone[0].get_parameter(name), rtol=1e-6, atol=1e-7)


def test_router_bias_moves_towards_balance():
    stream = ragged_stream()
    batches = [stream.batch(stream.next_rows(2)), stream.batch(stream.next_rows(1))]
    parts = make(bias_speed=0.25)
    result = step(parts, batches, update_bias=True)
    gate = parts[0].moe.gate
    load = gate.expert_load
    assert load.sum().item() == 2 * sum(batch.tokens for batch in batches)
    assert torch.equal(gate.e_score_correction_bias, 0.25 * torch.sign(load.double().mean() - load).float())
    assert result.balance["load_cv"] == pytest.approx((load.double().std(correction=0) / load.double().mean()).item())
    still = make(bias_speed=0.0)
    step(still, batches)
    assert not still[0].moe.gate.e_score_correction_bias.any()


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_non_finite_loss_stops_before_the_update(poison: float):
    """An embedding that only one document uses becomes inf; its micro-batch and its document are named."""
    stream = ragged_stream()
    rows = stream.next_rows(6)
    batches = [stream.batch(rows[i : i + 2]) for i in (0, 2, 4)]
    rare = VOCABULARY - 1
    for batch in batches:
        batch.input_ids[batch.input_ids == rare] = 0
    batches[1].input_ids[3] = rare
    parts = make()
    with torch.no_grad():
        parts[0].embed.weight[rare] = poison
    before = {name: value.clone() for name, value in parts[0].state_dict().items()}
    with pytest.raises(TrainingError) as error:
        step(parts, batches, number=7)
    message = str(error.value)
    assert message.startswith("step 7: ") and "micro-batch 2 of 3" in message
    assert "micro-batch 1" not in message and "micro-batch 3" not in message
    assert batches[1].origins[0] in message
    assert "weights are those of step 6" in message
    for name, value in parts[0].state_dict().items():
        assert torch.equal(before[name].nan_to_num(), value.nan_to_num()), name
    assert not parts[2].state


def test_a_finite_loss_with_a_non_finite_gradient_stops_too():
    """sqrt at 0: the loss is finite, its derivative is not (0 / 0), which no check of the loss can see."""

    class Kink(StandIn):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return SimpleNamespace(loss=out.loss + (self.head.weight[0] * 0).abs().sqrt().sum())

    torch.manual_seed(0)
    model = Kink()
    masters = MasterWeights(model, torch.float32)
    parts = (model, masters, make_optimizer(masters.trainable, OptimSection(lr=0.01)))
    stream = ragged_stream()
    before = model.head.weight.detach().clone()
    with pytest.raises(TrainingError, match="gradient norm nan"):
        step(parts, [stream.batch(stream.next_rows(2))])
    assert torch.equal(model.head.weight, before)


def test_evaluation_weighs_tokens_not_batches():
    stream = ragged_stream()
    model = make()[0].train()
    losses = []
    for rows in (1, 3, 100):
        stream.position = {"epoch": 0, "row": 0}
        losses.append(evaluate(model, stream.batches(rows), loss_chunk=5))
        assert model.training and not model.moe.gate.expert_load.any()
    assert losses[0] == pytest.approx(losses[2], rel=1e-6) and losses[1] == pytest.approx(losses[2], rel=1e-6)
    total = count = 0.0
    for example in stream.examples:
        ids = torch.from_numpy(example.input_ids.astype(np.int64))
        x = model.embed(ids)
        logits = model.head(x + model.moe(x)[0]).log_softmax(-1)
        for t in range(len(ids) - 1):
            if example.target_mask[t + 1]:
                total, count = total - logits[t, ids[t + 1]].item(), count + 1
    assert losses[2] == pytest.approx(total / count, rel=1e-5)


def test_evaluation_can_be_stopped_and_refuses_what_is_not_finite():
    stream = ragged_stream()
    model = make()[0].eval()
    answers = iter([False, True])
    assert evaluate(model, stream.batches(2), loss_chunk=5, stop=lambda: next(answers)) is None
    assert not model.training
    with torch.no_grad():
        model.head.weight.fill_(math.nan)
    stream.position = {"epoch": 0, "row": 0}
    with pytest.raises(TrainingError, match="validation loss is nan for the documents doc:"):
        evaluate(model, stream.batches(2), loss_chunk=5)
