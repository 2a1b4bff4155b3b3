"""The vocabulary projection, and the loss on top of it without ever holding the logits of all tokens.

T tokens, N of them with a target, C rows of one chunk, H hidden width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from automimo.errors import ConfigError, DataError
from automimo.fp32 import compute_dtype, without_autocast

NO_TARGET = -100


class LMHead(nn.Linear):
    """Linear map [H] -> [V] without bias that can also return the loss itself."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, bias=False, device=device, dtype=dtype)

    def forward(self, hidden: Tensor, targets: Tensor | None = None, chunk: int = 1024) -> Tensor:
        """Logits [..., V] of `hidden` [..., H]; with `targets` [...], the fp32 sum of the cross entropy (a scalar).

        targets int64, -100 where a token has none: such rows are left out before the projection and cost nothing.
        `chunk` rows are projected at a time: at most chunk x V logits exist. Softmax and weight gradient are in fp32.
        Raises `DataError` for a target outside the vocabulary, `ConfigError` for a chunk below 1.
        """
        if targets is None:
            return super().forward(hidden)
        return cross_entropy_sum(hidden, self.weight, targets, chunk)


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = 1024) -> Tensor:
    """fp32 sum over all targets but -100 of the cross entropy of `hidden` [..., H] times `weight` [V, H] transposed.

    The gradients are made in the same pass as the loss, chunk by chunk, and only scaled in backward; without gradients
    (no-grad mode, frozen weight, frozen hidden states) the work for them is not done.
    """
    if chunk < 1:
        raise ConfigError(f"the loss chunk must be at least 1 token, got {chunk}")
    if targets.shape != hidden.shape[:-1]:
        raise DataError(f"targets of shape {tuple(targets.shape)} do not fit hidden states {tuple(hidden.shape)}")
    hidden_TH, targets_T = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    rows_N = (targets_T != NO_TARGET).nonzero().squeeze(1)
    targets_N = targets_T.index_select(0, rows_N)
    outside = (targets_N < 0) | (targets_N >= weight.shape[0])
    if outside.any():
        row = int(rows_N[outside][0])
        raise DataError(
            f"target {int(targets_T[row])} at token {row} is outside the vocabulary of {weight.shape[0]}; "
            f"{NO_TARGET} marks a token without a target"
        )
    grad_mode = torch.is_grad_enabled()
    wanted = (grad_mode and hidden.requires_grad, grad_mode and weight.requires_grad)
    loss: Tensor = _CrossEntropySum.apply(hidden_TH, weight, rows_N, targets_N, chunk, compute_dtype(hidden), wanted)
    return loss


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        rows_N: Tensor,
        targets_N: Tensor,
        chunk: int,
        dtype: torch.dtype,
        wanted: tuple[bool, bool],
    ) -> Tensor:
        with without_autocast(hidden_TH.device):
            hidden_NH = hidden_TH.index_select(0, rows_N).to(dtype)
            loss, grad_NH, grad_VH = _loss_and_gradients(hidden_NH, weight_VH.to(dtype), targets_N, chunk, wanted)
        ctx.save_for_backward(rows_N, grad_NH, grad_VH)
        ctx.hidden_like = torch.empty_like(hidden_TH, device="meta")  # shape and dtype only
        ctx.weight_dtype = weight_VH.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows_N, grad_NH, grad_VH = ctx.saved_tensors
        grad_hidden = grad_weight = None
        if grad_NH is not None:
            grad_hidden = torch.zeros_like(ctx.hidden_like, device=grad_NH.device)
            grad_hidden.index_copy_(0, rows_N, (grad_NH * grad).to(grad_hidden.dtype))
        if grad_VH is not None:
            # Not in place: the graph may be kept for a second backward.
            grad_weight = torch.mul(grad_VH, grad, out=torch.empty_like(grad_VH, dtype=ctx.weight_dtype))
        return grad_hidden, grad_weight, None, None, None, None, None


def _loss_and_gradients(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, chunk: int, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss (fp32), and its gradients for the hidden states (their dtype) and the weight (fp32) where wanted."""
    want_hidden, want_weight = wanted
    accurate = torch.promote_types(hidden_NH.dtype, torch.float32)
    loss_N = torch.empty_like(targets_N, dtype=accurate)
    grad_NH = torch.empty_like(hidden_NH) if want_hidden else None
    grad_VH = torch.zeros_like(weight_VH, dtype=accurate) if want_weight else None
    for start in range(0, hidden_NH.shape[0], chunk):
        part = slice(start, start + chunk)
        hidden_CH = hidden_NH[part]
        logits_CV = hidden_CH @ weight_VH.T
        _softmax_gradient_(logits_CV, targets_N[part].unsqueeze(1), loss_N[part], want_hidden or want_weight)
        if grad_NH is not None:
            torch.mm(logits_CV, weight_VH, out=grad_NH[part])
        if grad_VH is not None:
            if grad_VH.dtype == logits_CV.dtype:
                grad_VH.addmm_(logits_CV.T, hidden_CH)
            else:
                grad_VH += logits_CV.T @ hidden_CH
    return loss_N.sum(), grad_NH, grad_VH


def _softmax_gradient_(logits_CV: Tensor, targets_C1: Tensor, loss_C: Tensor, want_gradient: bool) -> None:
    """Fill `loss_C`; where wanted, replace the logits by d loss / d logits = softmax - 1 at the target.

    In fp32, by strips of a few rows: no fp32 copy of the chunk exists, and on a CPU a strip stays in the cache from the
    softmax to the last pass (16 rows: 3.5 s where the whole chunk at once takes 4.0 s, bf16, 1,024 tokens, one thread).
    """
    rows = 16 if logits_CV.device.type == "cpu" else 256
    strips = zip(logits_CV.split(rows), targets_C1.split(rows), loss_C.split(rows), strict=True)
    for logits_RV, targets_R1, loss_R in strips:
        scores_RV = logits_RV.log_softmax(1, dtype=loss_C.dtype)
        chosen_R1 = scores_RV.gather(1, targets_R1)
        loss_R.copy_(chosen_R1.squeeze(1)).neg_()
        if want_gradient:
            # exp(s) - 1 without cancellation where the target is nearly certain
            scores_RV.exp_().scatter_(1, targets_R1, chosen_R1.expm1())
            logits_RV.copy_(scores_RV)
