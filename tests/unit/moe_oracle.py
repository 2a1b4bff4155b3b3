"""A mixture-of-experts layer as slow and plain as possible: Python loops over tokens, documents and experts."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from automimo.moe import MoEConfig


def make_config(**changes) -> MoEConfig:
    values = {
        "n_routed_experts": 8,
        "n_shared_experts": None,
        "n_activated_experts": 2,
        "n_expert_groups": 1,
        "n_limited_groups": 1,
        "train_gate": True,
        "gate_bias_update_factor": 0.0,
        "aux_loss_coeff": 0.0,
        "score_func": "sigmoid_with_bias",
        "route_scale": None,
        "dim": 16,
        "inter_dim": 32,
        "moe_inter_dim": 8,
        "norm_topk_prob": True,
        "dtype": "float32",
    }
    return MoEConfig.from_dict(values | changes)


def scores_of(logits: list[float], score_func: str) -> list[float]:
    if score_func.startswith("sigmoid"):
        return [1 / (1 + math.exp(-z)) for z in logits]
    top = max(logits)
    powers = [math.exp(z - top) for z in logits]
    return [p / sum(powers) for p in powers]


def choose(scores: list[float], bias: list[float] | None, config: MoEConfig) -> list[int]:
    """Experts of one token: the best groups by the sum of their two best, then the best experts in them."""
    size = config.n_routed_experts // config.n_expert_groups
    biased = [s + (bias[e] if bias else 0.0) for e, s in enumerate(scores)]
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.n_expert_groups)]
    best = 2 if bias else 1
    value = [sum(sorted((biased[e] for e in group), reverse=True)[:best]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda g: -value[g])[: config.n_limited_groups]
    candidates = [e for g in kept for e in groups[g]]
    return sorted(candidates, key=lambda e: -biased[e])[: config.n_activated_experts]


def router_weights(scores: list[float], chosen: list[int], config: MoEConfig) -> list[float]:
    weights = [scores[e] for e in chosen]
    if config.norm_topk_prob:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    return [w * (1.0 if config.route_scale is None else config.route_scale) for w in weights]


def balance_loss(scores: list[list[float]], chosen: list[list[int]], documents: list[int], config: MoEConfig) -> float:
    """Per document n_d * sum_e f_e P_e, summed over documents."""
    experts, k = config.n_routed_experts, config.n_activated_experts
    total = 0.0
    for document in set(documents):
        tokens = [t for t, d in enumerate(documents) if d == document]
        for e in range(experts):
            load = sum(chosen[t].count(e) for t in tokens)
            f = load * experts / (k * len(tokens))
            total += len(tokens) * f * sum(scores[t][e] for t in tokens) / len(tokens)
    return total


def slow_moe(
    x: Tensor, gate: Tensor, bias: Tensor | None, gate_up: Tensor, down: Tensor, config: MoEConfig, rows: list[int]
) -> Tensor:
    """The layer one (token, expert) pair at a time; differentiable. Rows of x that are not in `rows` give 0."""
    out = [torch.zeros(config.dim, dtype=x.dtype) for _ in range(x.shape[0])]
    inter = config.moe_inter_dim
    for t in rows:
        logits = gate @ x[t]
        scores = logits.sigmoid() if config.score_func.startswith("sigmoid") else logits.softmax(0)
        chosen = choose(scores.tolist(), None if bias is None else bias.tolist(), config)
        weights = torch.stack([scores[e] for e in chosen])
        if config.norm_topk_prob:
            weights = weights / (weights.sum() + 1e-20)
        weights = weights * (1.0 if config.route_scale is None else config.route_scale)
        for w, e in zip(weights, chosen, strict=True):
            hidden = x[t] @ gate_up[e]
            out[t] = out[t] + w * ((F.silu(hidden[:inter]) * hidden[inter:]) @ down[e])
    return torch.stack(out)
