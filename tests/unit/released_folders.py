"""Checkpoint folders of small models in every released form, written with the safetensors library.

`released` is the short way: logical values, stored form, folder; it returns what the stored bytes mean.
"""

import json
import math
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from released_oracle import BLOCK, FLASH_FORMS, HEAD_DIM, V_HEAD_DIM, Shape, store
from safetensors.torch import save_file
from torch import Tensor

# ---------------------------------------------------------------- the logical model


def attention_keys(shape: Shape, prefix: str) -> dict[str, tuple[int, ...]]:
    heads, kv_heads = shape.heads(prefix)
    hidden = shape.hidden_size
    keys: dict[str, tuple[int, ...]] = {
        f"{prefix}self_attn.q_proj.weight": (heads * HEAD_DIM, hidden),
        f"{prefix}self_attn.k_proj.weight": (kv_heads * HEAD_DIM, hidden),
        f"{prefix}self_attn.v_proj.weight": (kv_heads * V_HEAD_DIM, hidden),
        f"{prefix}self_attn.o_proj.weight": (hidden, heads * V_HEAD_DIM),
    }
    if not shape.full(prefix):
        keys[f"{prefix}self_attn.attention_sink_bias"] = (heads,)
    return keys


def mlp_keys(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def text_keys(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden = shape.hidden_size
    keys: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for i in range(shape.num_hidden_layers):
        layer = f"model.layers.{i}."
        keys[f"{layer}input_layernorm.weight"] = (hidden,)
        keys |= attention_keys(shape, layer)
        keys[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        if i == 0:
            keys |= mlp_keys(f"{layer}mlp.", hidden, shape.intermediate_size)
            continue
        keys[f"{layer}mlp.gate.weight"] = (shape.n_routed_experts, hidden)
        keys[f"{layer}mlp.gate.e_score_correction_bias"] = (shape.n_routed_experts,)
        for e in range(shape.n_routed_experts):
            keys |= mlp_keys(f"{layer}mlp.experts.{e}.", hidden, shape.moe_intermediate_size)
    keys["model.norm.weight"] = (hidden,)
    keys["lm_head.weight"] = (shape.vocab_size, hidden)
    for i in range(shape.mtp_layers):
        block = f"model.mtp.layers.{i}."
        keys[f"{block}eh_proj.weight"] = (hidden, 2 * hidden)
        for norm in ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
            keys[f"{block}{norm}.weight"] = (hidden,)
        keys |= attention_keys(shape, block) | mlp_keys(f"{block}mlp.", hidden, shape.intermediate_size)
    return keys


def vision_keys(hidden_out: int) -> dict[str, tuple[int, ...]]:
    """4 blocks of width 32: 4 heads and 2 kv heads of 64, sinks in the windowed blocks 1 and 2."""
    keys: dict[str, tuple[int, ...]] = {"visual.patch_embed.proj.weight": (32, 3, 2, 16, 16)}
    for i in range(4):
        block = f"visual.blocks.{i}."
        linears = {"attn.qkv": (512, 32), "attn.proj": (32, 256), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32)}
        for name, size in (linears | {"mlp.down_proj": (32, 48)}).items():
            keys[f"{block}{name}.weight"] = size
            keys[f"{block}{name}.bias"] = size[:1]
        keys[f"{block}norm1.weight"] = keys[f"{block}norm2.weight"] = (32,)
        if i in (1, 2):
            keys[f"{block}attn.sinks"] = (4,)
    merger = {"ln_q": (32,), "mlp.0": (128, 128), "mlp.2": (hidden_out, 128)}
    return keys | {f"visual.merger.{name}.weight": size for name, size in merger.items()}


def audio_keys(hidden_out: int) -> dict[str, tuple[int, ...]]:
    """12 codebooks, 2 layers of width 32, groups of 4."""
    keys: dict[str, tuple[int, ...]] = {f"speech_embeddings.{i}.weight": (40, 32) for i in range(12)}
    transformer = "audio_encoder.input_local_transformer."
    for i in range(2):
        layer = f"{transformer}layers.{i}."
        for name in ("q", "k", "v"):
            keys[f"{layer}self_attn.{name}_proj.weight"] = (32, 32)
            keys[f"{layer}self_attn.{name}_proj.bias"] = (32,)
        keys[f"{layer}self_attn.o_proj.weight"] = (32, 32)
        keys |= mlp_keys(f"{layer}mlp.", 32, 128)
        keys[f"{layer}input_layernorm.weight"] = keys[f"{layer}post_attention_layernorm.weight"] = (32,)
    keys[f"{transformer}norm.weight"] = (32,)
    keys["audio_encoder.projection.mlp.0.weight"] = (512, 128)
    keys["audio_encoder.projection.mlp.2.weight"] = (hidden_out, 512)
    return keys


def values(shape: Shape, seed: int = 0) -> dict[str, Tensor]:
    """The logical model in fp32: every value on the BF16 grid, but the router weights and biases, which are stored F32.

    Magnitudes change every 64 rows and 32 columns, so that a scale of another block gives other numbers; every
    dense gate_proj has one block of zeros.
    """
    keys = text_keys(shape)
    if shape.vision:
        keys |= vision_keys(shape.hidden_size)
    if shape.audio:
        keys |= audio_keys(shape.hidden_size)
    result: dict[str, Tensor] = {}
    for key, size in keys.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
        x = torch.randn(size, generator=generator)
        if len(size) == 1:
            x = 1 + 0.1 * x if "norm" in key else x
        else:
            rows = torch.rand(math.ceil(size[0] / 64), generator=generator).mul(4).sub(2).exp2()
            columns = torch.rand(math.ceil(size[1] / 32), generator=generator).mul(2).sub(1).exp2()
            factor = rows.repeat_interleave(64)[: size[0], None] * columns.repeat_interleave(32)[None, : size[1]]
            x = 0.02 * x * factor.reshape(*factor.shape, *[1] * (len(size) - 2))
        if key.endswith("mlp.gate_proj.weight") and key.startswith("model."):
            x[:BLOCK, :BLOCK] = 0
        result[key] = x if ".mlp.gate." in key else x.bfloat16().float()
    return result


# ---------------------------------------------------------------- config.json


# The small towers in the words of the released files, where two numbers of the audio config are strings.
VISION_CONFIG = """{
  "depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_key_value_heads": 2,
  "num_query_groups": 2, "in_chans": 3, "patch_size": 16, "spatial_patch_size": 16, "temporal_patch_size": 2,
  "spatial_merge_size": 2, "tokens_per_second": 2, "hidden_act": "silu", "fullatt_block_indexes": [0, 3],
  "use_sink": true, "visual_token_window_size": 64, "window_size": 128, "vit_window_attn_types": [-1, 0, 1, -1]
}"""
AUDIO_CONFIG = """{
  "add_post_norm": true, "audio_channels": 12, "audio_segment_size": 6000, "group_size": 4,
  "input_full_attention": true, "input_local_attn_heads": 2, "input_local_dim": 32, "input_local_head_dim": 16,
  "input_local_hidden_dropout": 0.0, "input_local_intermediate_size": 128, "input_local_layers": 2,
  "partial_rotary_factor": 1.0, "projection_layers": 2, "rope_theta": 640000,
  "speech_vocab_size": "40", "speech_zeroemb_idx": "32"
}"""


def quantization_config(shape: Shape, form: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    if form == "mxfp4-fused":
        result |= {"store_dtype": "mxfp4", "mxfp4_block_size": 32}
    elif not shape.pro:
        result["store_dtype"] = "fp8"  # V2.5-Pro does not state it
    ignored = [f"model.layers.{i}.self_attn.o_proj" for i in range(shape.num_hidden_layers)]
    # The released name for the output projections of the MTP blocks, which no tensor has.
    return result | {"ignored_layers": [*ignored, "model.decoder.self_attn.o_proj"]}


def text_config(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "swa_num_attention_heads": shape.swa_num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "swa_num_key_value_heads": shape.swa_num_key_value_heads,
        "head_dim": HEAD_DIM,
        "swa_head_dim": HEAD_DIM,
        "v_head_dim": V_HEAD_DIM,
        "swa_v_head_dim": V_HEAD_DIM,
        "partial_rotary_factor": 0.334,
        "rope_theta": 10000000,
        "swa_rope_theta": 10000,
        "max_position_embeddings": 1048576,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "attention_chunk_size": 128,
        "attention_value_scale": 0.612 if shape.pro else 0.707,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "intermediate_size": shape.intermediate_size,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "n_routed_experts": shape.n_routed_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "n_shared_experts": None,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": None,
        "layernorm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "hybrid_layer_pattern": list(shape.pattern),
        "moe_layer_freq": [0] + [1] * (shape.num_hidden_layers - 1),
        "transformers_version": "4.57.1",
    }


def config(shape: Shape, form: str) -> dict[str, Any]:
    """config.json as the release of this form words it.

    Split forms are `mimo_v2_flash` where V2-Flash could have the shape (text only, twice the kv heads on sliding
    layers), else `mimo_v2` without a layout key; fused and contiguous ones are `mimo_v2` with `fused_qkv`. As in the
    releases, the number of MTP blocks is stated by V2.6 only and the checkpoint TP by none. Token ids are moved into
    the small vocabulary, because model classes refuse a padding id outside of it.
    """
    result = text_config(shape)
    split = form in (*FLASH_FORMS, "bf16-split", "fp8-split-plain")
    towers = shape.vision or shape.audio
    if split and not towers and shape.swa_num_key_value_heads == 2 * shape.num_key_value_heads:
        result |= {"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash"}
        result |= {"rope_theta": 5000000, "max_position_embeddings": 262144}
    else:
        result |= {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2"}
        names = {"AutoConfig": "configuration_mimo_v2.MiMoV2Config", "AutoModel": "modeling_mimo_v2.MiMoV2Model"}
        result["auto_map"] = names | {"AutoModelForCausalLM": "modeling_mimo_v2.MiMoV2ForCausalLM"}
    if not split:
        result["attention_projection_layout"] = "fused_qkv"
    if not shape.pro and result["model_type"] == "mimo_v2":
        # Not for V2-Flash: transformers' own class was written for its released config and fails on this key.
        result["rope_scaling"] = {"rope_type": "default", "type": "default"}
    if shape.pro:
        result["torch_dtype"] = "bfloat16"
    else:
        result |= {"dtype": "bfloat16", "hybrid_block_size": None}
        result |= {"eos_token_id": shape.vocab_size - 8, "pad_token_id": shape.vocab_size - 10}
    width = {"out_hidden_size": shape.hidden_size}
    if shape.vision:
        result |= {"vision_config": json.loads(VISION_CONFIG) | width, "vision_model_type": "mimovl"}
        result |= {"image_token_id": shape.vocab_size - 6, "video_token_id": shape.vocab_size - 5}
        result |= {"vision_start_token_id": shape.vocab_size - 4, "vision_end_token_id": shape.vocab_size - 3}
    if shape.audio:
        result["audio_config"] = json.loads(AUDIO_CONFIG) | width
    if towers:
        result["processor_config"] = {"merge_size": 2, "patch_size": 16, "fps": 1.0}
    if form == "mxfp4-fused":
        result |= {"layernorm_epsilon": 1e-6, "moe_router_dtype": "bfloat16"}
        result["num_nextn_predict_layers"] = shape.mtp_layers
        rope = {"partial_rotary_factor": 0.334, "rope_theta": 10000000, "rope_type": "default"}
        result["rope_parameters"] = rope
    if not form.startswith("bf16"):
        result["quantization_config"] = quantization_config(shape, form)
    return result


# ---------------------------------------------------------------- files


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_side_files(path: Path) -> None:
    """What lies next to the weights of a release, and one file that nobody knows."""
    generation = {"do_sample": False, "max_new_tokens": 2048, "eos_token_id": [151643, 151645, 151672]}
    write_json(path / "generation_config.json", generation)
    (path / "tokenizer.json").write_bytes(b'{"version": "1.0",\r\n  "note": "carried byte for byte"}')
    write_json(path / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    (path / "chat_template.jinja").write_bytes(b"{%- for m in messages %}<|im_start|>{{ m.role }}{% endfor %}")
    (path / "modeling_mimo_v2.py").write_bytes(b"raise RuntimeError('code of a checkpoint must not be run')\n")
    (path / "NOTICE.txt").write_bytes(b"\xff\x00 not text\n")
    folders = {"dflash": ("layers.0.mlp.gate_proj.weight", "fc.weight"), "audio_tokenizer": ("encoder.conv1.weight",)}
    for name, keys in folders.items():
        (path / name).mkdir()
        write_json(path / name / "config.json", {"model_type": name, "hidden_size": 8})
        generator = torch.Generator().manual_seed(len(name))
        tensors = {key: torch.randn(8, 8, generator=generator).bfloat16() for key in keys}
        save_file(tensors, path / name / "model.safetensors", {"format": "pt"})


def write_folder(
    path: Path,
    stored: dict[str, Tensor],
    config: dict[str, Any],
    *,
    shards: int = 1,
    metadata: dict[str, Any] | None = None,
    side_files: bool = True,
) -> Path:
    """Write a checkpoint folder in the released manner.

    Neighbouring keys go to different shards, so that a weight and its scale, or q, k and v, never share a file when
    `shards` > 1; MTP has a file of its own. There is an index unless everything fits `model.safetensors`; `metadata`
    (say `{"tp_size": 4}`) goes into the index and forces one.
    """
    path.mkdir(parents=True, exist_ok=True)
    main = [key for key in stored if not key.startswith("model.mtp.")]
    files: dict[str, dict[str, Tensor]] = {}
    for i, key in enumerate(main):
        files.setdefault(f"model_pp0_ep0_shard{i % shards}.safetensors", {})[key] = stored[key]
    if len(main) < len(stored):
        files["model_mtp.safetensors"] = {key: x for key, x in stored.items() if key not in set(main)}
    if len(files) == 1 and metadata is None:
        files = {"model.safetensors": stored}
    else:
        total = {"total_size": sum(x.nbytes for x in stored.values())}
        names = {key: name for name, tensors in files.items() for key in tensors}
        index = {"metadata": total | (metadata or {}), "weight_map": dict(sorted(names.items()))}
        write_json(path / "model.safetensors.index.json", index)
    for name, tensors in files.items():
        save_file(tensors, path / name, {"format": "pt"})
    write_json(path / "config.json", config)
    if side_files:
        write_side_files(path)
    return path


@lru_cache(maxsize=4)
def built(shape: Shape, form: str, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stored and decoded tensors, kept for the next test: do not change them in place."""
    return store(values(shape, seed), shape, form)


def released(
    path: Path,
    shape: Shape,
    form: str,
    seed: int = 0,
    *,
    shards: int = 1,
    metadata: dict[str, Any] | None = None,
    side_files: bool = True,
) -> dict[str, Tensor]:
    """Write the folder of a form and return its decoded tensors (fp32, by split key; not to be changed in place)."""
    stored, decoded = built(shape, form, seed)
    options: dict[str, Any] = {"shards": shards, "metadata": metadata, "side_files": side_files}
    write_folder(path, stored, config(shape, form), **options)
    return dict(decoded)
