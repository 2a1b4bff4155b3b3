"""Norm, rotary tables and the dense SwiGLU of MiMo-V2.

Legend: T tokens, D hidden, F intermediate, R rotary width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from automimo.errors import ConfigError


class MiMoV2RMSNorm(nn.Module):
    """Root-mean-square norm: normalise in fp32, cast to the input dtype, then multiply by the weight.

    The order is that of the released modelling files; multiplying before the cast differs by one bf16 rounding.
    `fused` uses `torch.nn.functional.rms_norm`, which multiplies first and is faster.
    """

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype | None = None, *, fused: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps = eps
        self.fused = fused

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> same shape and dtype."""
        if self.fused or x.dtype == torch.float32 == self.weight.dtype:
            # In fp32 the two orders are the same function up to one rounding, and the fused one saves four passes.
            return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)
        return self.weight.to(x.dtype) * F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype)


class MiMoV2FlashRotaryEmbedding(nn.Module):
    """cos and sin of the rotary angles of one layer kind.

    The rotary width R is head_dim * partial_rotary_factor rounded down and made even (192 * 0.334 -> 64). Nothing is
    stored: the R/2 inverse frequencies are computed in fp32 where they are used, so neither a cast of the model to bf16
    nor construction on the meta device can round or lose them.

    Raises ConfigError when the rotary width is not positive.
    """

    def __init__(self, rope_theta: float, head_dim: int, partial_rotary_factor: float = 1.0) -> None:
        super().__init__()
        self.rope_theta = rope_theta
        self.rotary_dim = rotary_width(head_dim, partial_rotary_factor)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids [..., T] int -> cos, sin [..., T, R] in the dtype of `x`, computed in fp32.

        inv_freq_i = theta^(-2i/R), i = 0 .. R/2 - 1; angles are repeated for the two halves (rotate-half pairing).
        """
        with torch.autocast(x.device.type, enabled=False):
            exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64, device=x.device).float() / self.rotary_dim
            inv_freq = 1.0 / (self.rope_theta**exponent)
            angles = position_ids.to(device=x.device, dtype=torch.float32).unsqueeze(-1) * inv_freq
            angles = torch.cat((angles, angles), dim=-1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotary_width(head_dim: int, partial_rotary_factor: float) -> int:
    """How many leading dimensions of a head rotate: floor(head_dim * factor), made even."""
    width = int(head_dim * partial_rotary_factor) // 2 * 2
    if width <= 0:
        raise ConfigError(
            f"Invalid rotary_dim {width}: head_dim {head_dim} * partial_rotary_factor {partial_rotary_factor} "
            "must be at least 2"
        )
    return width


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotation to the first R dimensions of x [T, heads, d]; cos, sin [T, R]. The rest passes through.

    The result has the dtype of `x`, which under autocast is narrower than that of the tables.
    """
    width = cos.shape[-1]
    rotated, rest = x[..., :width], x[..., width:]
    first, second = rotated.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class SwiGLU(nn.Module):
    """The dense feed-forward: down(silu(gate x) * up x), without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
