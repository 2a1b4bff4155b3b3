"""The router: which experts a token goes to, and with what weight.

T tokens, D hidden width, E experts, K experts per token, G expert groups.
"""

from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from automimo.errors import TrainingError
from automimo.fp32 import KeepFp32, without_autocast
from automimo.moe.config import MoEConfig


class Documents(NamedTuple):
    """Which document each token is of: `ids_T` int64 [T] in 0 .. number - 1. Only the balance loss asks."""

    ids_T: Tensor
    number: int


class RouterStats(NamedTuple):
    """What a layer reports of one forward: `load_E` int64, tokens per expert; `aux_loss` fp32 scalar or None."""

    load_E: Tensor
    aux_loss: Tensor | None


class Routing(NamedTuple):
    """Result of the router: `weights_TK` fp32, `indices_TK` int64, `load_E` int64, `aux_loss` fp32 scalar or None."""

    weights_TK: Tensor
    indices_TK: Tensor
    load_E: Tensor
    aux_loss: Tensor | None


class Gate(KeepFp32):
    """Router of one layer, computed in fp32 whatever the dtype of the hidden states, autocast or not.

    `weight` [E, D] fp32; `e_score_correction_bias` [E] fp32 buffer, saved with the model (None where the config has
    none); `expert_load` [E] int64 buffer, not saved: what `record` has counted since `reset_load`.

    Forward never changes state, because activation checkpointing runs it twice.
    """

    e_score_correction_bias: Tensor | None
    expert_load: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        experts = config.n_routed_experts
        weight = torch.empty(experts, config.dim, dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=config.train_gate)
        bias = torch.zeros(experts, dtype=torch.float32) if config.has_correction_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.register_buffer("expert_load", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self._recorded = False
        self.reset_parameters(0.02)

    @torch.no_grad()
    def reset_parameters(self, std: float, generator: torch.Generator | None = None) -> None:
        """Normal weight of standard deviation `std`, zero correction bias, nothing counted."""
        self.weight.normal_(0.0, std, generator=generator)
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias.zero_()
        self.reset_load()

    def forward(
        self, x_TD: Tensor, documents: Documents | None = None, context: dist.ProcessGroup | None = None
    ) -> Routing:
        """Route the rows of `x_TD`, all of which are real tokens.

        s = sigmoid or softmax of x W^T. The experts are the K best of s + correction bias, after the group step; their
        weights are s itself, without the bias, divided by their sum (+ 1e-20) if `norm_topk_prob`, times `route_scale`.
        `documents` says which tokens share a document (None: all); `context` are the ranks that have tokens of the same
        documents (None: they are whole here). Only the balance loss reads the two.
        """
        config = self.config
        with without_autocast(x_TD.device):
            # .to(): fp32, or float64 where a test has widened the whole model.
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            logits_TE = F.linear(x_TD.to(dtype), self.weight.to(dtype))
            scores_TE = logits_TE.sigmoid() if config.score_func.startswith("sigmoid") else logits_TE.softmax(-1)
            indices_TK = self._choose(scores_TE.detach())
            weights_TK = scores_TE.gather(1, indices_TK)
            if config.norm_topk_prob:
                weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
            if config.route_scale is not None:
                weights_TK = weights_TK * config.route_scale
            load_E = count(indices_TK.flatten(), config.n_routed_experts)
            aux_loss = None
            if self.training and config.aux_loss_coeff > 0:
                aux_loss = config.aux_loss_coeff * balance_loss(scores_TE, indices_TK, documents, context)
        return Routing(weights_TK, indices_TK, load_E, aux_loss)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        config, bias = self.config, self.e_score_correction_bias
        choice_TE = scores_TE if bias is None else scores_TE + bias
        groups, kept = config.n_expert_groups, config.n_limited_groups
        if kept < groups:
            choice_TGe = choice_TE.unflatten(1, (groups, -1))
            # Sum of the two best biased scores; without a bias, the best one.
            best = 1 if bias is None else min(2, choice_TGe.shape[-1])
            group_TG = choice_TGe.topk(best, dim=-1).values.sum(-1)
            winners = group_TG.topk(kept, dim=-1, sorted=False).indices
            lost_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(1, winners, False)
            # -inf, not 0: a biased score may be negative, and a loser must not beat it.
            choice_TE = choice_TGe.masked_fill(lost_TG.unsqueeze(-1), -torch.inf).flatten(1)
        return choice_TE.topk(config.n_activated_experts, dim=-1).indices

    @torch.no_grad()
    def record(self, stats: RouterStats | Routing) -> None:
        """Add the counts of one forward to `expert_load`. Call it once per forward, outside checkpointed regions."""
        self.expert_load += stats.load_E
        self._recorded = True

    @torch.no_grad()
    def reset_load(self) -> None:
        """Forget what was counted."""
        self.expert_load.zero_()
        self._recorded = False

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the correction bias one step towards an even load: bias += factor * sign(mean load - load).

        To be called once after each optimizer step, with the load of that step recorded. Auxiliary-loss-free balancing,
        arXiv 2408.15664. Raises `TrainingError` if no step is configured, outside training, or with nothing counted.
        """
        bias, factor = self.e_score_correction_bias, self.config.gate_bias_update_factor
        if bias is None or factor <= 0:
            raise TrainingError(f"the router bias cannot be updated: gate_bias_update_factor is {factor}, not above 0")
        if not self.training:
            raise TrainingError("the router bias cannot be updated in evaluation mode; call train() on the model first")
        if not self._recorded:
            raise TrainingError("the router bias cannot be updated: no expert load was recorded since the last reset")
        # In whole numbers, sign(sum - E * load) = sign(mean - load): an even load gives exactly 0.
        direction = torch.sign(self.expert_load.sum() - self.expert_load * self.expert_load.numel())
        bias += factor * direction.to(bias.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        was_meta = self.expert_load.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.expert_load.is_meta:
            self.reset_load()  # to_empty leaves whatever was in memory, and no checkpoint fills this buffer
        return self


def count(ids: Tensor, size: int) -> Tensor:
    """How often each of 0..size-1 occurs in `ids` [N]; int64. Unlike bincount it needs no answer from the device."""
    return torch.zeros(size, dtype=torch.int64, device=ids.device).index_add_(0, ids, torch.ones_like(ids))


def balance_loss(
    scores_TE: Tensor,
    indices_TK: Tensor,
    documents: Documents | None,
    context: dist.ProcessGroup | None = None,
) -> Tensor:
    """Balance loss as a sum over tokens, so that neither packing nor accumulation can change it.

    sum over documents d of n_d * sum_e f_de * P_de, with n_d the tokens of d, f_de = load_de * E / (K * n_d) and P_de
    the mean score of expert e over d. Divided by the tokens of the whole optimizer step this is the token-weighted mean
    of the per-document loss. Perfect balance gives n_d * mean score * E per document.

    The ranks of `context` have parts of the same documents: they add up the counts, and each returns the part of the
    sum that its own tokens make.
    """
    experts, k = scores_TE.shape[1], indices_TK.shape[1]
    ids_T, number = documents or Documents(torch.zeros_like(indices_TK[:, 0]), 1)
    # n_d f_de P_de = E/K * load_de / n_d * (sum of the scores over d), and load_de / n_d is read back per token.
    counts = count((ids_T.unsqueeze(1) * experts + indices_TK).flatten(), number * experts)
    counts = torch.cat([counts, count(ids_T, number)])
    if context is not None:
        dist.all_reduce(counts, group=context)
    load_DE, tokens_D = counts[: number * experts].view(number, experts), counts[number * experts :]
    share_DE = load_DE.to(scores_TE.dtype) / tokens_D.clamp(min=1).unsqueeze(1)
    return (experts / k) * (scores_TE * share_DE.index_select(0, ids_T)).sum()
