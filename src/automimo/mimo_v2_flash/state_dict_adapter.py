"""State dicts of a MiMo-V2 model <-> those of a Hugging Face checkpoint, in whatever layout that is stored.

What the layouts are is in `storage/`; how stacks of experts become matrices in `automimo.moe`. This is the form in
which loaders and savers of whole state dicts ask for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from automimo.backend import BackendConfig
from automimo.checkpoint import Ledger, StateDictAdapter
from automimo.checkpoint.adapter import StateDict
from automimo.distributed.local import local_tensor
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.adapter_decode import FP8, Decoder, check_decoded, fused_reader
from automimo.mimo_v2_flash.adapter_tensors import (
    check_projections,
    empty_stored,
    encoded,
    full_key,
    mxfp4_destinations,
    projection,
    quantization_of,
    scale_tensor,
    stored_form,
    uses_mxfp4,
)
from automimo.mimo_v2_flash.adapter_tp import resolve_checkpoint_tp
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage.geometry import attention_shape
from automimo.mimo_v2_flash.storage.matrices import (
    FP8_SCALE,
    MXFP4_SCALE,
    fused_matrices,
    is_quantised,
    is_routed_expert,
    stored_tensors,
)
from automimo.mimo_v2_flash.storage.target import TargetForm
from automimo.mimo_v2_flash.weights import SINK, SINK_OF_TE, is_carried
from automimo.moe import MoEConfig
from automimo.moe.split_experts import MoESplitExpertsStateDictMixin, copy_to_native, copy_whole


class MiMoV2FlashStateDictAdapter(MoESplitExpertsStateDictMixin, StateDictAdapter):
    """Converts between our stacks of experts and split q, k, v and a checkpoint's keys, layout and quantisation.

    A load: ``to_hf(state, quantization=True, for_checkpoint_load=True)`` gives destinations as the checkpoint stores
    its tensors, the loader fills them, and `from_hf` decodes them into the model and returns the model's own tensors.
    Destinations that a layout leaves as the model has them are views of the model, so filling them was all.

    `from_hf` of any other state dict decodes into new tensors of `dtype`; what is neither stacked, fused nor quantised
    passes through as it is. `moe_config` is None for a model without experts. `revision` is the Hub revision the
    checkpoint comes from. Keys may lack the "model." in front, as those of the inner model do.
    """

    def __init__(
        self,
        config: MiMoV2FlashConfig,
        moe_config: MoEConfig | None,
        backend: BackendConfig,
        dtype: torch.dtype = torch.bfloat16,
        revision: str | None = None,
    ) -> None:
        self.config = config
        self.moe_config = moe_config
        self.backend = backend
        self.dtype = dtype
        self.revision = revision
        # Ends of keys that the attention of a backend holds under another name, with its values in fp32.
        self.hf_to_internal_map: dict[str, str] = {SINK: SINK_OF_TE} if backend.attn == "te" else {}
        self.internal_to_hf_map = {internal: hf for hf, internal in self.hf_to_internal_map.items()}
        # From `to_hf(for_checkpoint_load=True)` until `from_hf`, the decoder knows the model's tensor (or the view of
        # its stack) that each key of the split layout is loaded into, and these are its stacks by name.
        self._decoder = Decoder(config, dtype)
        self._stacks: dict[str, Tensor] = {}

    @property
    def _uses_fused_qkv_checkpoint(self) -> bool:
        """Whether the checkpoint stores q, k and v as one tensor."""
        return self.config.attention_projection_layout == "fused_qkv"

    @cached_property
    def checkpoint_tp_size(self) -> int:
        """Tensor-parallel shards that the fused projections of the checkpoint were written in, found out once.

        See `resolve_checkpoint_tp`; `from_hf` also looks at the scales it is given. Raises CheckpointError.
        """
        return resolve_checkpoint_tp(self.config, self.revision)

    @property
    def supports_write_through_checkpoint_load(self) -> bool:
        """Whether every destination of a load is a view of the model's own storage: only in the plain split layout."""
        return not self._uses_fused_qkv_checkpoint and quantization_of(self.config) is None

    # -- keys ----------------------------------------------------------------------------------------------------------

    @staticmethod
    def _apply_key_mapping(state_dict: StateDict, mapping: dict[str, str]) -> StateDict:
        """Rename, in place, the keys that end in a key of `mapping`; their values become fp32."""
        if mapping:
            items = list(state_dict.items())
            state_dict.clear()
            for key, value in items:
                new = _mapped(key, mapping)
                state_dict[new] = value if new == key else value.to(torch.float32)
        return state_dict

    def _model_to_hf_key(self, model_key: str) -> str:
        """The checkpoint key of one of our tensors that is no stack."""
        return _mapped(model_key, self.internal_to_hf_map)

    # -- to a checkpoint -----------------------------------------------------------------------------------------------

    def to_hf(
        self, state_dict: StateDict, exclude_key_regex: str | None = None, quantization: bool = False, **kwargs: Any
    ) -> StateDict:
        """Our state dict as checkpoint tensors; keys of the split layout that match `exclude_key_regex` are left out.

        Without `quantization` they are views in the split layout. With it they are in the layout that the config says
        the checkpoint has (`attention_projection_layout`, `quantization_config`): FP8, or FP8 with MXFP4 experts, q, k
        and v fused in `checkpoint_tp_size` shards; router, biases, sinks, norms, embeddings and output projections stay
        views. `for_checkpoint_load=True` asks for destinations of a load instead of values, and `from_hf` will fill the
        model from them.

        Raises KeyError for a layer without all of q, k and v where they are fused, CheckpointError, with the key, for
        what the layout cannot hold.
        """
        views: dict[str, Tensor] = {}
        for fqn, tensor in state_dict.items():
            views.update(self._views(fqn, tensor, exclude_key_regex))
        load = bool(kwargs.get("for_checkpoint_load", False))
        if load:
            self._decoder.native = dict(views)
            self._stacks = {name: tensor for name, tensor in state_dict.items() if self._is_stack(name)}
        if not quantization:
            return views
        return self._load_destinations(views) if load else self._export(views)

    def convert_single_tensor_to_hf(self, fqn: str, tensor: Any, **kwargs: Any) -> list[tuple[str, Any]]:
        """The checkpoint tensors, as (key, tensor), of our tensor `fqn`; keywords as in `to_hf`.

        A quantised q, k or v that is stored together with others cannot be converted alone: CheckpointError.
        """
        views = dict(self._views(fqn, tensor, kwargs.get("exclude_key_regex")))
        if kwargs.get("quantization", False):
            load = kwargs.get("for_checkpoint_load", False)
            views = self._load_destinations(views) if load else self._export(views)
        return list(views.items())

    def _views(self, fqn: str, tensor: Any, exclude: str | None) -> list[tuple[str, Any]]:
        views = ((self._model_to_hf_key(key), view) for key, view in self._split_experts(fqn, tensor))
        return [(key, view) for key, view in views if exclude is None or not re.match(exclude, key)]

    def _form(self) -> TargetForm:
        return stored_form(self.config, self.checkpoint_tp_size if self._uses_fused_qkv_checkpoint else None)

    def _export(self, views: Mapping[str, Tensor]) -> StateDict:
        whole = {
            key: view.full_tensor() if isinstance(view, DTensor) and is_quantised(full_key(key)) else view
            for key, view in views.items()
        }
        return encoded(whole, self.config, self._form())

    def _load_destinations(self, views: Mapping[str, Tensor]) -> StateDict:
        """Memory for a loader to fill: new where the checkpoint stores other bytes than the model, else the views."""
        result: StateDict = {}
        fused, mxfp4 = self._uses_fused_qkv_checkpoint, uses_mxfp4(self.config)
        if fused:
            check_projections(views)
        for key, view in views.items():
            found = projection(key) if fused else None
            if found is not None:
                prefix, part = found
                if part == "q_proj":
                    query, keys, values = (views[f"{prefix}.{name}_proj.weight"] for name in "qkv")
                    layer = int(prefix.split(".")[-2])
                    result.update(self._make_fused_qkv_load_destinations(prefix, layer, query, keys, values))
            elif mxfp4 and is_routed_expert(full_key(key)):
                result.update(self._make_mxfp4_load_destinations(key, view))
            elif is_quantised(full_key(key)):
                # Whole also for a DTensor: its shards end inside blocks, and only `from_hf` cuts them out.
                result[key] = torch.empty(view.shape, dtype=FP8, device=view.device)
                result[f"{key}{FP8_SCALE}"] = self._create_scale_inv_for_hf_key(key, view)
            else:
                result[key] = view
        return result

    def _make_fused_qkv_load_destinations(
        self, prefix: str, layer_idx: int, query: Tensor, key: Tensor, value: Tensor
    ) -> dict[str, Tensor]:
        """Memory for the fused FP8 weight and its fp32 scales of one layer, whole on every rank, and a note that
        `from_hf` shall decode them into `query`, `key` and `value` (tensors or DTensors, [rows, hidden]).

        `prefix` ends in `self_attn`; `layer_idx` selects the shape. Raises CheckpointError when the three have not the
        rows of the config or are on several devices.
        """
        shape = attention_shape(self.config, f"model.layers.{layer_idx}.self_attn")
        natives = {f"{prefix}.{part}_proj.weight": t for part, t in zip("qkv", (query, key, value), strict=True)}
        for (name, tensor), rows in zip(natives.items(), (shape.q, shape.k, shape.v), strict=True):
            if tuple(tensor.shape) != (rows, self.config.hidden_size):
                raise CheckpointError(
                    f"{name}: has shape {list(tensor.shape)}, config.json asks for {[rows, self.config.hidden_size]}"
                )
        devices = {local_tensor(tensor).device for tensor in natives.values()}
        if len(devices) > 1:
            raise CheckpointError(f"{prefix}: q, k and v are on several devices: {', '.join(map(str, devices))}")
        matrices = fused_matrices(prefix, shape, self.config.hidden_size, self.checkpoint_tp_size, "F8_E4M3")
        self._decoder.native.update(natives)
        return {tensor.key: empty_stored(tensor, query.device) for tensor in stored_tensors(matrices)}

    def _make_mxfp4_load_destinations(self, key: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        """Memory for the packed codes [out, in / 2] and scales [out, in / 32] (uint8) of the expert matrix `weight`
        [out, in]; for a DTensor they are DTensors placed alike. Raises CheckpointError for what MXFP4 cannot hold.
        """
        return mxfp4_destinations(key, weight)

    def _create_scale_inv_for_hf_key(self, key: str, weight: Tensor) -> Tensor:
        """fp32 ones in the shape of the scales that the released files store next to an FP8 `weight` [out, in]."""
        form = stored_form(self.config, tp=None)
        stored = scale_tensor(key, (weight.shape[0], weight.shape[1]), self.config, form)
        return torch.ones(stored.shape, dtype=torch.float32, device=weight.device)

    # -- from a checkpoint ---------------------------------------------------------------------------------------------

    def from_hf(
        self,
        hf_state_dict: StateDict,
        device_mesh: DeviceMesh | None = None,
        **kwargs: Any,  # noqa: ARG002 - loaders pass options of their own
    ) -> StateDict:
        """Checkpoint tensors, in any released layout, as our state dict. Parts that a text model does not hold (MTP,
        vision, audio) are left out.

        With a `device_mesh` new stacks of experts are DTensors that hold this rank's experts (`moe.new_stack`); the
        matrices of others may be absent. Raises CheckpointError, naming the keys, for tensors that do not fit each
        other or the config, and for an incomplete stack of experts.
        """
        state = {key: tensor for key, tensor in hf_state_dict.items() if not is_carried(full_key(key))}
        try:
            stacks = self._expert_stacks(_matrices(state), device_mesh, self._stacks)
            for name in stacks.keys() - self._stacks.keys():
                # The matrices are decoded straight into new stacks too.
                self._decoder.native.update(self._split_experts(name, stacks[name]))
            remote = set(self._remote_matrices(_matrices(state), stacks))
            state = {key: tensor for key, tensor in state.items() if _weight_of(key) not in remote}
            self._convert_fused_qkv(state)
            self._dequantize_mxfp4_experts(state)
            self._dequantize(state)
            check_decoded(state)
            self._fill_native(state, stacks)
            self._apply_key_mapping(state, self.hf_to_internal_map)
            return self._merge_experts(state, stacks)
        finally:
            self._decoder.native.clear()
            self._stacks = {}

    def _fill_native(self, state: StateDict, stacks: Mapping[str, Tensor]) -> None:
        """Put the model's own tensors into `state`, filled, for all that a load asked for but the matrices of `stacks`.

        Raises CheckpointError for what was asked for and is not there: it would keep the values of before.
        """
        asked = {key: t for key, t in self._decoder.native.items() if self._stack_name(key) not in stacks}
        ledger = Ledger({key: native.shape for key, native in asked.items()})
        for key in asked.keys() & state.keys():
            ledger.consume(key, state[key].shape)
        ledger.check("state dict", "a load has to bring every tensor that it asked for")
        for key, native in asked.items():
            copy_to_native(native, state[key])
            state[key] = native

    def _convert_fused_qkv(self, state_dict: StateDict) -> StateDict:
        """Replace fused projections [rows, hidden] and their scales by q, k and v: the model's own where a load is
        under way (it is then over for them), else new ones. Changes and returns `state_dict`.

        Raises CheckpointError for shapes and scales that the config and `checkpoint_tp_size` do not explain.
        """
        found = fused_reader(state_dict)
        if found is not None:
            reader, names = found
            if "checkpoint_tp_size" not in vars(self):
                self.checkpoint_tp_size = resolve_checkpoint_tp(self.config, self.revision, reader.tensors)
            self._decoder.fused(state_dict, reader, names, self.checkpoint_tp_size)
        return state_dict

    def _dequantize_mxfp4_experts(self, state_dict: StateDict) -> StateDict:
        """Replace MXFP4 matrices (uint8 [out, in / 2], scales uint8 [out, in / 32]) by floating ones [out, in].
        Changes and returns `state_dict`.

        Raises CheckpointError for weights without scales, scales without weights and NaN scales.
        """
        self._decoder.mxfp4(state_dict)
        return state_dict

    def _dequantize(self, state_dict: StateDict) -> StateDict:
        """Replace FP8 matrices [out, in] and their fp32 scales by floating ones. Changes and returns `state_dict`.

        The shapes of the scales say which grid they are: plain, or that of V2-Flash, where k and v of a full layer
        share rows. Raises CheckpointError for scales that fit no grid, are absent, or are no finite numbers.
        """
        self._decoder.fp8(state_dict)
        return state_dict

    @staticmethod
    def _local_tensor(tensor: Tensor) -> Tensor:
        """This rank's memory of a tensor or DTensor."""
        return local_tensor(tensor)

    @staticmethod
    def _copy_converted_to_native(native_tensor: Tensor, local_view: Tensor, converted: Tensor) -> None:
        """Copy a whole tensor into `local_view`, this rank's memory of `native_tensor`, without communication."""
        copy_whole(native_tensor, local_view, converted)

    def _check_expert_matrices(self, found: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> None:
        """As in the base class, with unexpected keys too, folded by their numbers."""
        count = self.moe_config.n_routed_experts if self.moe_config is not None else 0
        ledger = Ledger({key: view.shape for key, view in needed.items()})
        for key, matrix in found.items():
            ledger.consume(key, matrix.shape)
        ledger.check("state dict", f"the model has {count} experts per layer")


def _mapped(key: str, mapping: Mapping[str, str]) -> str:
    for end, new in mapping.items():
        if key == end or key.endswith(f".{end}"):
            return f"{key.removesuffix(end)}{new}"
    return key


def _weight_of(key: str) -> str:
    """The weight that a key is, or is the scale of."""
    return key.removesuffix(FP8_SCALE).removesuffix(MXFP4_SCALE)


def _matrices(state: StateDict) -> StateDict:
    """The tensors of a state dict that are matrices, without their scales."""
    return {key: tensor for key, tensor in state.items() if key.endswith(".weight")}
