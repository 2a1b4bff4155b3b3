"""MiMo-V2 as a causal language model: the backbone, the vocabulary head, loading and saving.

Legend: T tokens of the stream, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from automimo.attention import KVCache
from automimo.backend import BackendConfig
from automimo.checkpoint import CheckpointReader, FolderContents, HFCheckpointingMixin, TensorEntry, write_text_atomic
from automimo.checkpoint.mixin import Checkpointer, Layout, Tokenizer
from automimo.errors import CheckpointError, ConfigError
from automimo.mimo_v2_flash.backbone import MiMoV2FlashBlock, MiMoV2FlashModel
from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig, dtype_name
from automimo.mimo_v2_flash.config_files import with_window
from automimo.mimo_v2_flash.cp import local_modal_feature_indices, prepare_inputs, without_media_places
from automimo.mimo_v2_flash.export import own_entries, source_contents, split_contents
from automimo.mimo_v2_flash.lm_head import LMHead
from automimo.mimo_v2_flash.source import config_values, read_config, resolve_folder
from automimo.mimo_v2_flash.state_dict_adapter import MiMoV2FlashStateDictAdapter
from automimo.mimo_v2_flash.storage import SourceOptions, StoredCheckpoint
from automimo.mimo_v2_flash.weights import load_weights
from automimo.moe import MoEConfig, MoEFSDPSyncMixin

__all__ = [
    "MODEL_CLASSES",
    "MiMoV2FlashBlock",
    "MiMoV2FlashForCausalLM",
    "MiMoV2FlashModel",
    "MiMoV2ForCausalLM",
    "TieSupport",
    "compute_lm_head_logits",
    "model_class_of",
]


class TieSupport(Enum):
    """Which values of `tie_word_embeddings` a model class can honour."""

    UNTIED_ONLY = "untied_only"
    TIED_ONLY = "tied_only"
    BOTH = "both"


@dataclass(frozen=True)
class ModelCapabilities:
    """Which kinds of parallelism the model code supports."""

    supports_tp: bool = False
    supports_cp: bool = True
    supports_pp: bool = True
    supports_ep: bool = True


class MiMoV2FlashForCausalLM(HFCheckpointingMixin, nn.Module, MoEFSDPSyncMixin):
    """MiMo-V2-Flash with its vocabulary head.

    `moe_config` replaces the router and expert settings read from `config`; `moe_overrides` (a keyword) replaces single
    ones. Weights are uninitialised until `initialize_weights`, or filled by `from_pretrained`. `revision` names the Hub
    revision the checkpoint is read from. `state_dict_adapter` exists if `backend.enable_hf_state_dict_adapter`.
    """

    state_dict_adapter: MiMoV2FlashStateDictAdapter

    config_class: ClassVar[type[MiMoV2FlashConfig]] = MiMoV2FlashConfig
    tie_word_embeddings_support: ClassVar[TieSupport] = TieSupport.UNTIED_ONLY
    ModelCapabilities = ModelCapabilities
    # Held by modules that refuse to be cast (fp32.KeepFp32, the rotary tables); named for whoever casts by name.
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [
        "mlp.gate.weight",
        "e_score_correction_bias",
        "attention_sink_bias",
        "attn_module.softmax_offset",
        "rotary_emb",
        "swa_rotary_emb",
    ]

    def __init__(
        self,
        config: MiMoV2FlashConfig,
        moe_config: MoEConfig | None = None,
        backend: BackendConfig | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        overrides = kwargs.pop("moe_overrides", None)
        if kwargs:
            raise TypeError(f"{type(self).__name__} takes no argument {', '.join(map(repr, kwargs))}")
        self.config = config
        self.backend = backend or BackendConfig()
        self.revision = revision
        # The folder the weights came from: it supplies what a text run carries through to the export.
        self.source_folder: Path | None = None
        self.source_options = SourceOptions()
        self.model = MiMoV2FlashModel(config, self.backend, moe_config=moe_config, moe_overrides=overrides)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, dtype=config.dtype)
        if self.backend.enable_hf_state_dict_adapter:
            self.state_dict_adapter = MiMoV2FlashStateDictAdapter(
                config, self.model.moe_config, self.backend, dtype=config.dtype, revision=revision
            )

    @classmethod
    def from_config(
        cls,
        config: MiMoV2FlashConfig,
        moe_config: MoEConfig | None = None,
        backend: BackendConfig | None = None,
        **kwargs: Any,
    ) -> Self:
        """Same as the constructor: a model without weights, on the default device (``torch.device("meta")`` works)."""
        return cls(config, moe_config, backend, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, *model_args: Any, **kwargs: Any) -> Self:
        """Build the model of a local folder or a Hub id and load its weights.

        Keywords: `dtype` (default: the one in config.json; the router and the sinks stay fp32), `load_weights` (False
        gives the bare model), `revision` (Hub), `backend`, `moe_config`, `moe_overrides`, `config` (use this one
        instead of the folder's; it is copied), `sliding_window` (the number of keys a query sees, itself included),
        `source_options` (what the folder does not tell about its layout). Any released layout is read: split or fused,
        plain, FP8 or MXFP4.

        Raises CheckpointError when the folder and its config do not fit each other, naming the keys, ConfigError for a
        config that no MiMo-V2 model can have.
        """
        if model_args:
            raise TypeError(f"from_pretrained takes one positional argument, got {1 + len(model_args)}")
        dtype = kwargs.pop("dtype", None)
        with_weights = kwargs.pop("load_weights", True)
        window = kwargs.pop("sliding_window", None)
        config = kwargs.pop("config", None)
        options = kwargs.pop("source_options", SourceOptions())
        revision = kwargs.get("revision")
        folder = resolve_folder(pretrained_model_name_or_path, revision, weights=with_weights)
        config = read_config(folder, cls.config_class) if config is None else deepcopy(config)
        if dtype is not None and dtype != "auto":
            config.dtype = getattr(torch, dtype_name(dtype))
        if window is not None:
            if window < 1:
                raise ConfigError(f"sliding_window: a query sees at least itself, so it must be >= 1, got {window}")
            config.sliding_window = window
        if not with_weights:
            model = cls.from_config(config, **kwargs)
            model.source_options = options
            return model
        with CheckpointReader(folder) as reader:
            source = StoredCheckpoint(reader, config, options)
            with torch.device("meta"):
                model = cls.from_config(config, **kwargs)
            model.to_empty(device=torch.get_default_device())
            load_weights(model, source)
        model.source_folder, model.source_options = folder, options
        return model

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        padding_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,  # noqa: ARG002 - meaningless without pixels
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,  # noqa: ARG002
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        targets: Tensor | None = None,
        loss_chunk: int = 1024,
        cache: KVCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, or the loss when `targets` is given.

        Inputs are those of `MiMoV2FlashModel.forward`. Logits are [B, S, V] for input [B, S] and [1, T, V] for a packed
        stream; `logits_to_keep` n > 0 keeps the last n positions (0 all), a tensor selects positions.

        `targets` has one id per input position, the token that position should predict (already shifted), and -100
        where there is none. `loss` is then the fp32 *sum* of the cross entropy over the valid targets, computed
        `loss_chunk` tokens at a time inside the head, so that the full logits never exist; `logits` is None.

        `hidden_states` (on request) has the states before every block and after the last norm, [B, S, D] or [T, D].
        Raises ValueError for inputs that contradict each other and for media, which need a vision tower.
        """
        if inputs_embeds is None and (pixel_values is not None or pixel_values_videos is not None):
            raise ValueError("pixel_values need a vision tower: a config with a non-empty vision_config, built with it")
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        collect: list[Tensor] | None = [] if output_hidden_states else None
        hidden = self.model(
            input_ids,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            attention_mask=attention_mask,
            padding_mask=padding_mask,
            cache=cache,
            collect=collect,
            **without_media_places(kwargs),
        )
        states = None if collect is None else tuple(collect)
        if targets is not None:
            loss = self.lm_head(hidden.flatten(0, -2), targets.reshape(-1), loss_chunk)
            return CausalLMOutputWithPast(loss=loss, hidden_states=states)
        output = compute_lm_head_logits(self.lm_head, hidden, logits_to_keep, is_thd=hidden.dim() == 2)
        output.hidden_states = states
        return output

    def prepare_model_inputs_for_cp(self, batch: dict[str, Any], num_chunks: int = 1) -> dict[str, Any]:
        """{"cp_sharder": a `ContextParallelSharder` strategy} for a packed batch under any attention backend.

        It sets up this model's attention when it cuts its first batch; here no weight or layer is touched. `num_chunks`
        are the micro-batches of a pipeline. Raises ConfigError (a ValueError) unless the batch is packed (thd).
        """
        return prepare_inputs(self, self.config, batch, num_chunks)

    @staticmethod
    def _local_modal_feature_indices(global_mask: Tensor | None, local_indices: Tensor | None) -> Tensor | None:
        """See `cp.local_modal_feature_indices`."""
        return local_modal_feature_indices(global_mask, local_indices)

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        """The vocabulary head."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: LMHead) -> None:
        """Replace the vocabulary head."""
        self.lm_head = new_embeddings

    @torch.no_grad()
    def initialize_weights(
        self, buffer_device: torch.device | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Random weights in fp32 from the global generator, then cast to `dtype` (router and sinks stay fp32).

        The head is a normal of standard deviation 1/sqrt(D), truncated at three of them, so that the first logits have
        unit variance.
        """
        self.to(torch.float32)
        self.model.init_weights(buffer_device)
        std = self.config.hidden_size**-0.5
        nn.init.trunc_normal_(self.lm_head.weight, std=std, a=-3 * std, b=3 * std)
        self.to(dtype)

    def save_pretrained(
        self,
        save_directory: str | Path,
        checkpointer: Checkpointer | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        source: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        """As `HFCheckpointingMixin.save_pretrained`; `source` defaults to the folder the weights were read from."""
        source = self.source_folder if source is None else source
        super().save_pretrained(save_directory, checkpointer, tokenizer, source=source, **kwargs)

    def checkpoint_entries(self, dtype: torch.dtype | None) -> list[TensorEntry]:
        """The model's own tensors in the split layout, stored in `dtype` (None: as they are)."""
        return own_entries(self.state_dict(), dtype or self.lm_head.weight.dtype)

    def folder_contents(
        self, source: CheckpointReader | None, dtype: torch.dtype | None, layout: Layout
    ) -> FolderContents:
        """The tensors of an export; see `export.split_contents` and `export.source_contents`."""
        stored = None
        if source is not None:
            config = read_config(source.folder, self.config_class)
            stored = StoredCheckpoint(source, config, self.source_options)
        if layout == "source":
            assert stored is not None  # save_pretrained has checked it
            return source_contents(self.state_dict(), stored)
        return split_contents(self.state_dict(), dtype or self.lm_head.weight.dtype, stored)

    def write_config(
        self, folder: Path, source: Path | None, dtype: torch.dtype | None, layout: Layout = "split"
    ) -> None:
        """Write the config.json of an export: the source's with the model's window, or ours in the split layout."""
        if layout == "source":
            assert source is not None
            values = with_window(config_values(source), self.config.sliding_window)
        else:
            values = self.config.to_diff_dict()
            stored = dtype or self.lm_head.weight.dtype
            # The folder holds plain tensors under split names, whatever the source was stored as.
            for key in ("quantization_config", "checkpoint_tp_size"):
                values.pop(key, None)
            values.update(
                # Not simply our class: FSDP2 makes the model an instance of a subclass made on the fly.
                architectures=[next(c.__name__ for c in type(self).__mro__ if c in MODEL_CLASSES.values())],
                attention_projection_layout="split",
                dtype=str(stored).removeprefix("torch."),
            )
        text = json.dumps(values, indent=2, sort_keys=layout == "split", allow_nan=False)
        write_text_atomic(folder / "config.json", text + "\n")


class MiMoV2ForCausalLM(MiMoV2FlashForCausalLM):
    """MiMo-V2.5 and MiMo-V2.6: the same text model under the `mimo_v2` config."""

    config_class: ClassVar[type[MiMoV2FlashConfig]] = MiMoV2Config
    ModelCapabilities = ModelCapabilities

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, *model_args: Any, **kwargs: Any) -> Self:
        """As `MiMoV2FlashForCausalLM.from_pretrained`, reading config.json as a MiMoV2Config."""
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)


def compute_lm_head_logits(
    lm_head: nn.Module | None, hidden_states: Tensor, logits_to_keep: int | Tensor = 0, is_thd: bool = False
) -> CausalLMOutputWithPast:
    """Logits of the kept positions of hidden_states [B, S, D] or, packed, [T, D] (logits [1, T, V]).

    Without a head (a pipeline stage that has none) the logits are the hidden states.
    """
    if isinstance(logits_to_keep, int):
        kept: slice | Tensor = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
    else:
        kept = logits_to_keep
    hidden_states = hidden_states[kept] if is_thd else hidden_states[:, kept]
    logits = hidden_states if lm_head is None else lm_head(hidden_states)
    return CausalLMOutputWithPast(logits=logits.unsqueeze(0) if is_thd else logits)


MODEL_CLASSES: dict[str, type[MiMoV2FlashForCausalLM]] = {
    MiMoV2FlashConfig.model_type: MiMoV2FlashForCausalLM,
    MiMoV2Config.model_type: MiMoV2ForCausalLM,
}


def model_class_of(folder: Path) -> type[MiMoV2FlashForCausalLM]:
    """The class that a checkpoint folder's `model_type` asks for.

    Raises CheckpointError when config.json cannot be read or is of another family.
    """
    model_type = config_values(folder).get("model_type")
    if model_type not in MODEL_CLASSES:
        raise CheckpointError(
            f"{folder}: model_type is {model_type!r}; AutoMiMo reads {' and '.join(map(repr, MODEL_CLASSES))}"
        )
    return MODEL_CLASSES[model_type]


ModelClass = MiMoV2FlashForCausalLM
