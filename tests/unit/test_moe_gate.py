import random

import moe_oracle as oracle
import pytest
import torch
from moe_oracle import make_config

from automimo.errors import TrainingError
from automimo.moe import Documents, Gate, RouterStats

# experts, groups, kept groups, experts per token
SHAPES = [
    (8, 1, 1, 2),
    (8, 1, 1, 8),
    (8, 4, 2, 3),
    (12, 3, 1, 4),
    (12, 3, 3, 5),
    (6, 6, 2, 2),
    (5, 1, 1, 1),
    (16, 4, 3, 6),
]
SCORES = ["sigmoid_with_bias", "sigmoid", "softmax", "softmax_with_bias"]


def make_gate(seed: int = 0, bias_spread: float = 0.3, **changes) -> Gate:
    torch.manual_seed(seed)
    gate = Gate(make_config(**changes))
    gate.reset_parameters(1.0)
    if gate.e_score_correction_bias is not None:
        gate.e_score_correction_bias.normal_(0.0, bias_spread)
    return gate


def slow_route(gate: Gate, x):
    """Chosen experts, weights and scores per token by the oracle, in Python floats."""
    bias = None if gate.e_score_correction_bias is None else gate.e_score_correction_bias.tolist()
    logits = (x.double() @ gate.weight.detach().double().T).tolist()
    scores = [oracle.scores_of(row, gate.config.score_func) for row in logits]
    chosen = [oracle.choose(row, bias, gate.config) for row in scores]
    weights = [oracle.router_weights(s, c, gate.config) for s, c in zip(scores, chosen, strict=True)]
    return chosen, weights, scores


@pytest.mark.parametrize("score_func", SCORES)
@pytest.mark.parametrize("shape", SHAPES)
def test_router_equals_the_loop(shape, score_func):
    experts, groups, kept, k = shape
    for seed, (norm, scale) in enumerate([(True, None), (False, 2.5), (True, 0.7)]):
        gate = make_gate(
            seed,
            n_routed_experts=experts,
            n_expert_groups=groups,
            n_limited_groups=kept,
            n_activated_experts=k,
            score_func=score_func,
            norm_topk_prob=norm,
            route_scale=scale,
        )
        x = torch.randn(40, 16)
        weights, indices, load, aux = gate(x)
        chosen, expected, _ = slow_route(gate, x)
        assert aux is None
        assert weights.dtype == torch.float32
        for t in range(40):
            got = dict(zip(indices[t].tolist(), weights[t].tolist(), strict=True))
            assert got == pytest.approx(dict(zip(chosen[t], expected[t], strict=True)), rel=2e-5)
        assert load.tolist() == [sum(row.count(e) for row in chosen) for e in range(experts)]
        assert load.sum() == 40 * k


def test_the_bias_selects_but_does_not_weigh():
    gate = make_gate(norm_topk_prob=False)
    x = torch.randn(30, 16)
    scores = (x @ gate.weight.T).sigmoid()
    gate.e_score_correction_bias.zero_()
    _, plain, _, _ = gate(x)
    gate.e_score_correction_bias[3] = 10.0
    weights, indices, load, _ = gate(x)
    assert load[3] == 30  # chosen by everyone now, before not
    assert (plain == 3).any(1).sum() < 30
    torch.testing.assert_close(weights, scores.gather(1, indices))
    assert weights.max() <= 1


def test_a_bias_that_makes_all_scores_negative_cannot_bring_back_a_lost_group():
    # With losers masked by 0 instead of -inf they would now win.
    gate = make_gate(n_expert_groups=4, n_limited_groups=2, n_activated_experts=3)
    gate.e_score_correction_bias.sub_(5.0)
    x = torch.randn(50, 16)
    _, indices, _, _ = gate(x)
    assert (indices // 2).unique(dim=1).shape[0] == 50
    assert all(len(set(row)) <= 2 for row in (indices // 2).tolist())
    assert [sorted(row) for row in indices.tolist()] == [sorted(row) for row in slow_route(gate, x)[0]]


def test_ties_choose_distinct_experts_of_equal_score():
    gate = make_gate()
    with torch.no_grad():
        gate.weight[4:] = gate.weight[:4]
    gate.e_score_correction_bias.zero_()
    x = torch.randn(50, 16)
    weights, indices, _, _ = gate(x)
    assert all(len(set(row)) == 2 for row in indices.tolist())
    # The best two biased scores are a tied pair, whichever order they come in.
    torch.testing.assert_close(weights, torch.full_like(weights, 0.5))
    assert torch.equal(indices[:, 0] % 4, indices[:, 1] % 4)
    assert torch.equal(gate(x).indices_TK, indices)


def test_scale_none_is_one():
    x = torch.randn(9, 16)
    assert torch.equal(make_gate(route_scale=None)(x).weights_TK, make_gate(route_scale=1.0)(x).weights_TK)


def test_a_single_normalised_expert_weighs_one():
    # As in transformers' router; the weight then carries no gradient.
    weights = make_gate(n_activated_experts=1)(torch.randn(9, 16)).weights_TK
    assert torch.equal(weights, torch.ones(9, 1))


@pytest.mark.parametrize("score_func", SCORES)
def test_gradients_of_weight_and_input(score_func):
    gate = make_gate(score_func=score_func, route_scale=1.7).double()
    x = torch.randn(6, 16, dtype=torch.float64, requires_grad=True)
    # A fixed choice: the numeric derivative must not step over a change of experts.
    weights = lambda x, w: torch.func.functional_call(gate, {"weight": w}, (x,))[0]  # noqa: E731
    assert torch.autograd.gradcheck(weights, (x, gate.weight))


def test_a_frozen_gate_still_passes_the_gradient_on():
    gate = make_gate(train_gate=False)
    x = torch.randn(5, 16, requires_grad=True)
    gate(x).weights_TK.square().sum().backward()
    assert gate.weight.grad is None
    assert x.grad.abs().sum() > 0


def test_fp32_inside_bf16_and_autocast():
    gate = make_gate()
    x = torch.randn(200, 16).bfloat16()
    expected = gate(x.float())
    for routing in (gate(x), _under_autocast(gate, x)):
        assert torch.equal(routing.weights_TK, expected.weights_TK)
        assert torch.equal(routing.indices_TK, expected.indices_TK)


def _under_autocast(gate, x):
    with torch.autocast("cpu", torch.bfloat16):
        return gate(x)


@pytest.mark.parametrize("score_func", SCORES)
def test_balance_loss_equals_the_loop(score_func):
    gate = make_gate(aux_loss_coeff=0.25, score_func=score_func)
    x = torch.randn(30, 16)
    rng = random.Random(1)
    for documents in ([0] * 30, sorted(rng.choices(range(6), k=30)), [7, 3] * 15, list(range(30))):
        aux = gate(x, Documents(torch.tensor(documents), max(documents) + 1)).aux_loss
        chosen, _, scores = slow_route(gate, x)
        expected = 0.25 * oracle.balance_loss(scores, chosen, documents, gate.config)
        assert aux.dtype == torch.float32
        assert aux.item() == pytest.approx(expected, rel=1e-5)
    one = Documents(torch.zeros(30, dtype=torch.int64), 1)
    assert gate(x).aux_loss.item() == pytest.approx(gate(x, one).aux_loss.item(), rel=1e-6)


def test_balance_loss_does_not_depend_on_micro_batches():
    gate = make_gate(aux_loss_coeff=1.0).double()
    x = torch.randn(60, 16, dtype=torch.float64, requires_grad=True)
    documents = torch.tensor([0] * 7 + [1] * 1 + [2] * 20 + [3] * 12 + [4] * 20)
    whole = gate(x, Documents(documents, 5)).aux_loss
    expected = torch.autograd.grad(whole, (x, gate.weight))
    parts = sum(gate(x[a:b], Documents(documents[a:b], 5)).aux_loss for a, b in ((0, 8), (8, 28), (28, 60)))
    torch.testing.assert_close(parts, whole)
    for got, want in zip(torch.autograd.grad(parts, (x, gate.weight)), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert expected[1].abs().sum() > 0
    order = torch.randperm(60)
    torch.testing.assert_close(gate(x[order], Documents(documents[order], 5)).aux_loss, whole)


def test_balance_loss_only_in_training_and_with_a_coefficient():
    x = torch.randn(4, 16)
    assert make_gate(aux_loss_coeff=0.0)(x).aux_loss is None
    assert make_gate(aux_loss_coeff=0.1).eval()(x).aux_loss is None


def test_even_routing_gives_the_smallest_balance_loss():
    # Uniform scores s: E/K * sum_te s * load_e / n = n * E * s, here with s = 1/2.
    gate = make_gate(aux_loss_coeff=1.0, n_activated_experts=8)
    with torch.no_grad():
        gate.weight.zero_()
    assert gate(torch.randn(12, 16)).aux_loss.item() == pytest.approx(12 * 8 * 0.5)


def test_bias_update_is_exact():
    gate = make_gate(gate_bias_update_factor=1e-3)
    before = gate.e_score_correction_bias.clone()
    for load in ([4, 0, 4, 8, 4, 4, 5, 3], [0, 0, 0, 0, 0, 0, 0, 0]):
        gate.record(RouterStats(torch.tensor(load), None))
    gate.update_bias()
    # the mean is 4
    step = 1e-3 * torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, 0.0, -1.0, 1.0])
    assert torch.equal(gate.e_score_correction_bias, before + step)


def test_bias_update_brings_an_uneven_router_into_balance():
    gate = make_gate(gate_bias_update_factor=0.02, bias_spread=0.0)
    with torch.no_grad():
        gate.weight[0] = 1.0  # with positive inputs expert 0 starts as everyone's choice
    x = torch.rand(500, 16)
    first = gate(x).load_E
    for _ in range(150):
        gate.reset_load()
        gate.record(gate(x))
        gate.update_bias()
    last = gate(x).load_E
    assert first.max() == 500
    assert last.max() < 0.4 * 500
    assert last.double().std() < 0.3 * first.double().std()


def test_bias_update_errors():
    x = torch.randn(4, 16)
    for gate, words in (
        (make_gate(), "not above 0"),
        (make_gate(score_func="softmax"), "not above 0"),
        (make_gate(gate_bias_update_factor=0.1).eval(), "evaluation mode"),
    ):
        gate.record(gate(x))
        with pytest.raises(TrainingError, match=words):
            gate.update_bias()
    gate = make_gate(gate_bias_update_factor=0.1)
    gate.record(gate(x))
    gate.reset_load()
    with pytest.raises(TrainingError, match="no expert load"):
        gate.update_bias()


def test_forward_changes_nothing_and_record_adds_up():
    gate = make_gate(gate_bias_update_factor=0.1, aux_loss_coeff=0.1)
    before = {name: tensor.clone() for name, tensor in (*gate.named_parameters(), *gate.named_buffers())}
    routing = gate(torch.randn(11, 16))
    for name, tensor in (*gate.named_parameters(), *gate.named_buffers()):
        assert torch.equal(tensor, before[name]), name
    gate.record(routing)
    gate.record(routing)
    assert torch.equal(gate.expert_load, 2 * routing.load_E)
    gate.reset_load()
    assert gate.expert_load.sum() == 0


def test_state_dict_holds_weight_and_bias_only():
    assert sorted(make_gate().state_dict()) == ["e_score_correction_bias", "weight"]
    assert sorted(make_gate(score_func="softmax").state_dict()) == ["weight"]
