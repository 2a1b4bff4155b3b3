"""Which scales the values of V2-Flash have: a check on the weights themselves.

In V2-Flash, k and v of a full layer's head were quantised as one strip of 320 rows, so that k's last row of scales also
belongs to the first 64 rows of v; one source says so. Read with v's own scales instead, these rows come out several
times too large or too small (about 6 times, in the one report). The rows of a head have no reason to differ in size by
where in the head they are, so the reading that makes both halves alike is the right one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log
from statistics import median

import torch

from automimo.checkpoint import CheckpointReader
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage.decode import read_matrix
from automimo.mimo_v2_flash.storage.geometry import attention_shape, is_full, released_tp
from automimo.mimo_v2_flash.storage.matrices import StoredMatrix, VScales, flash_kv_matrices, flash_shards
from automimo.mimo_v2_flash.storage.stored_checkpoint import Description
from automimo.quantization import BLOCK

# Two readings that differ by less, or halves that differ by more under the better one, prove nothing.
CLEAR_RATIO = 1.5
ALIKE_RATIO = 1.25
_V = ".v_proj.weight"


@dataclass(frozen=True)
class VReadings:
    """Medians over the `heads` that could be compared (those whose rows are not zero) in `layers` full layers.

    `difference` is the factor between the two readings of the first rows; `strip` and `own` the factor (>= 1) between
    the row norms of the two parts of a head under each.
    """

    layers: int
    heads: int
    difference: float
    strip: float
    own: float

    @property
    def verdict(self) -> VScales | None:
        """The reading that the weights ask for, None when they do not tell."""
        better, worse = sorted((self.strip, self.own))
        if not self.heads or self.difference < CLEAR_RATIO or better > ALIKE_RATIO or worse < CLEAR_RATIO:
            return None
        return "strip" if self.strip < self.own else "own"


def v_readings(reader: CheckpointReader, config: MiMoV2FlashConfig, description: Description) -> VReadings | None:
    """Compare the two readings of v in all full layers stored with the grids of V2-Flash; None when there are none.

    Reads v of these layers and the scales of k and v: 19 MB of a released V2-Flash. Raises CheckpointError for what
    cannot be decoded.
    """
    layers = 0
    ratios: dict[VScales, list[float]] = {"strip": [], "own": []}
    for key, found in description.matrices.items():
        readings = _both_readings(config, key, found, description)
        if readings is None:
            continue
        layers += 1
        for name, matrix in readings.items():
            ratios[name] += _ratios(reader, config, key, matrix)
    if not layers:
        return None
    pairs = [(a, b) for a, b in zip(ratios["strip"], ratios["own"], strict=True) if a > 0 and b > 0]
    return VReadings(
        layers,
        len(pairs),
        _spread(strip / own for strip, own in pairs),
        _spread(strip for strip, _ in pairs),
        _spread(own for _, own in pairs),
    )


def _both_readings(
    config: MiMoV2FlashConfig, key: str, found: StoredMatrix, description: Description
) -> dict[VScales, StoredMatrix] | None:
    """v of a layer under both readings, when its stored tensors allow both."""
    prefix = key.removesuffix(_V)
    if not key.endswith(_V) or found.encoding != "fp8" or not is_full(config, prefix):
        return None
    attention, tp = attention_shape(config, prefix), flash_shards(config, prefix)
    if tp is None or found.shape[0] != attention.v:
        return None
    pairs: dict[VScales, tuple[StoredMatrix, StoredMatrix]] = {
        "strip": flash_kv_matrices(prefix, attention, found.shape[1], tp, "strip"),
        "own": flash_kv_matrices(prefix, attention, found.shape[1], tp, "own"),
    }
    k = description.matrices.get(pairs["strip"][0].key)
    stored = {tensor for matrix in (k, found) if matrix is not None for tensor in matrix.stored}
    if any({tensor for matrix in pair for tensor in matrix.stored} != stored for pair in pairs.values()):
        return None
    return {name: pair[1] for name, pair in pairs.items()}


def _ratios(reader: CheckpointReader, config: MiMoV2FlashConfig, key: str, matrix: StoredMatrix) -> list[float]:
    """Median row norm of the rows that share k's last scales, over that of the other rows, of each shard; 0 where one
    is zero or not finite."""
    shard = attention_shape(config, key.removesuffix(_V)).shard(released_tp(config))
    shared = -shard.k % BLOCK
    value = read_matrix(reader, matrix, dtype=torch.float32)
    norms = value.square().mean(dim=1).sqrt().reshape(-1, shard.v)
    result = []
    for row in norms:
        first, rest = float(row[:shared].median()), float(row[shared:].median())
        usable = first > 0 and rest > 0 and first < float("inf") and rest < float("inf")
        result.append(first / rest if usable else 0.0)
    return result


def _spread(factors: Iterable[float]) -> float:
    """Median of factors where 2 and 1/2 count the same; 1 without any."""
    return exp(median([abs(log(factor)) for factor in factors] or [0.0]))
