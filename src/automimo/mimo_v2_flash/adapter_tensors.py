"""What the state-dict adapter knows about a checkpoint: its keys, the form it is stored in, how to encode to that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from automimo.checkpoint.safetensors_file import TORCH_DTYPES
from automimo.distributed.local import local_tensor
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage.encode import encode_group
from automimo.mimo_v2_flash.storage.geometry import attention_shape
from automimo.mimo_v2_flash.storage.matrices import (
    PARTS,
    StoredMatrix,
    StoredTensor,
    flash_kv_matrices,
    flash_shards,
    fp8_matrix,
    is_quantised,
    mxfp4_matrix,
    stored_tensors,
    stored_together,
)
from automimo.mimo_v2_flash.storage.target import TargetForm, target_form, target_matrices
from automimo.quantization import GROUP

# The parts of the inner model, whose own state dict has no "model." in front of its keys.
_INNER = re.compile(r"(layers|mtp|embed_tokens|norm)\.")
_PROJECTION = re.compile(rf"(?P<prefix>.*\.self_attn)\.(?P<part>{'|'.join(PARTS)})\.(?P<kind>weight|bias)$")


class IncompleteProjectionsError(CheckpointError, KeyError):
    """A layer of which q, k and v are not all there where the layout stores them as one; a KeyError too."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show its repr


def full_key(key: str) -> str:
    """The key as a whole checkpoint has it: with "model." in front where the inner model's own state dict has none."""
    return f"model.{key}" if _INNER.match(key) else key


def renamed(full: str, key: str) -> str:
    """`full`, a full key of the layer that `key` belongs to, with "model." in front only if `key` has it."""
    return full if full_key(key) == key else full.removeprefix("model.")


def stored_form(config: MiMoV2FlashConfig, tp: int | None) -> TargetForm:
    """The form that a quantised checkpoint of this config is stored in; `tp` are the shards of a fused attention."""
    quantisation = "mxfp4" if uses_mxfp4(config) else "fp8"
    layout = "fused" if config.attention_projection_layout == "fused_qkv" else "split"
    return target_form(config, quantisation, layout=layout, tp=tp)  # type: ignore[arg-type]


def uses_mxfp4(config: MiMoV2FlashConfig) -> bool:
    """Whether the config says that routed experts are stored in MXFP4."""
    return (quantization_of(config) or {}).get("store_dtype") == "mxfp4"


def quantization_of(config: MiMoV2FlashConfig) -> Mapping[str, object] | None:
    """`quantization_config` of a config, None when its checkpoint is not quantised."""
    return vars(config).get("quantization_config")  # an attribute only of configs whose file has it


def encoded(views: Mapping[str, Tensor], config: MiMoV2FlashConfig, form: TargetForm) -> dict[str, Tensor]:
    """Tensors of the split layout in a quantised form: what the released files quantise is encoded, q, k and v are
    fused if the form says so, everything else is passed on as it is.

    Raises IncompleteProjectionsError and CheckpointError, with the key, for what the form cannot hold.
    """
    names = {full_key(key): key for key in views}
    fused = form.layout == "fused"
    if fused:
        check_projections(views)
    shapes = {
        full: tuple(views[key].shape)
        for full, key in names.items()
        if is_quantised(full) or (fused and _PROJECTION.match(full))
    }
    groups = {group[0].key: group for group in stored_together(target_matrices(shapes, {}, config, form).values())}
    result: dict[str, Tensor] = {}
    for full, key in names.items():
        if full in groups:
            tensors = _encode(groups[full], [views[names[matrix.key]] for matrix in groups[full]])
            result.update((renamed(stored.key, key), tensor) for stored, tensor in tensors)
        elif full not in shapes:
            result[key] = views[key]
    return result


def _encode(group: Sequence[StoredMatrix], values: Sequence[Tensor]) -> list[tuple[StoredTensor, Tensor]]:
    stored = stored_tensors(group)
    if values[0].is_meta:
        return [(tensor, empty_stored(tensor, values[0].device)) for tensor in stored]
    return list(zip(stored, encode_group(group, [value.detach() for value in values]), strict=True))


def check_projections(keys: Mapping[str, object]) -> None:
    """Raise IncompleteProjectionsError unless every layer with one of q, k and v has all three."""
    for key in keys:
        match = _PROJECTION.match(key)
        if match is not None and match["kind"] == "weight":
            missing = [part for part in PARTS if f"{match['prefix']}.{part}.weight" not in keys]
            if missing:
                raise IncompleteProjectionsError(
                    f"Incomplete native QKV projection group: {match['prefix']} has {match['part']} but not "
                    f"{' and '.join(missing)}; the fused layout stores the three as one"
                )


def projection(key: str) -> tuple[str, str] | None:
    """(prefix, part) of the weight of a q, k or v projection of the text stack, None for any other key."""
    match = _PROJECTION.match(key)
    if match is None or match["kind"] == "bias" or not is_quantised(full_key(key)):
        return None
    return match["prefix"], match["part"]


def scale_tensor(key: str, shape: tuple[int, int], config: MiMoV2FlashConfig, form: TargetForm) -> StoredTensor:
    """The FP8 scales that are stored next to the matrix `key` of the split layout (in V2-Flash, those of k and v of
    full layers have rows of their own per head)."""
    full = full_key(key)
    found = projection(full)
    if found is not None and found[1] != "q_proj" and form.flash_grid and may_share_scales(found[0], config):
        attention = attention_shape(config, found[0])
        pair = flash_kv_matrices(found[0], attention, shape[1], form.tp, form.v_scales)
        return pair[found[1] == "v_proj"].scales[-1]
    return fp8_matrix(full, shape).scales[0]


def may_share_scales(prefix: str, config: MiMoV2FlashConfig) -> bool:
    """Whether k and v of the attention at `prefix` (a full key) share scales in V2-Flash's split FP8."""
    return flash_shards(config, prefix) is not None


def empty_stored(tensor: StoredTensor, device: torch.device) -> Tensor:
    """Uninitialised memory for a stored tensor."""
    return torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device=device)


def mxfp4_destinations(key: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Memory for the MXFP4 codes and scales of the matrix `weight` [out, in]; for a DTensor DTensors placed alike.

    Raises CheckpointError unless the columns, this rank's too, are whole groups.
    """
    local = local_tensor(weight)
    if weight.ndim != 2:
        raise CheckpointError(f"{key}: MXFP4 needs a matrix, got shape {list(weight.shape)}")
    for what, columns in (("it has", weight.shape[1]), ("this rank's part has", local.shape[1])):
        if columns % GROUP:
            raise CheckpointError(f"{key}: MXFP4 needs an input divisible by {GROUP}, {what} {columns} columns")
    whole, parts = (mxfp4_matrix(key, (tensor.shape[0], tensor.shape[1])).stored for tensor in (weight, local))
    result: list[tuple[str, Tensor]] = []
    for stored, part in zip(whole, parts, strict=True):
        memory = empty_stored(part, local.device)
        if isinstance(weight, DTensor):
            memory = DTensor.from_local(
                memory, weight.device_mesh, weight.placements, run_check=False,
                shape=torch.Size(stored.shape), stride=(stored.shape[1], 1),
            )  # fmt: skip
        result.append((stored.key, memory))
    return result
