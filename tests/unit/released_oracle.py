"""The bytes of released checkpoints and what they mean, written slowly from the published facts of the formats.

Nothing of the package is imported: loops over shards, heads, blocks and rows say what a released tensor holds. `store`
puts a logical model (split q/k/v, one key per expert) into one of `FORMS` and decodes the bytes again with decoders of
its own. Logical models and the folders around the tensors are in `released_folders`.
"""

import math
import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

BLOCK = 128  # rows and columns of an FP8 scale
HEAD_DIM, V_HEAD_DIM = 192, 128

FORMS = (
    "bf16-split",  # q_proj, k_proj, v_proj
    "bf16-fused",  # qkv_proj, rows interleaved by checkpoint TP shard
    "bf16-contiguous",  # qkv_proj, rows [Q; K; V]: community re-exports
    "fp8-split-plain",  # split, one ordinary 128 x 128 grid per tensor
    "fp8-flash",  # V2-Flash: on full layers K and V of a head share one strip of 320 rows
    "fp8-flash-own",  # V2-Flash as others read it: K's grid restarts per head, V has a grid of its own
    "fp8-fused",  # V2.5, V2.5-Pro: every shard has a grid of its own
    "fp8-contiguous",  # re-quantised [Q; K; V] under one grid
    "mxfp4-fused",  # V2.6: as fp8-fused, but MXFP4 experts and BF16 router weights
)
FLASH_FORMS = ("fp8-flash", "fp8-flash-own")
FP8_SUFFIXES = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up", "down"))


@dataclass(frozen=True)
class Shape:
    """Sizes of one synthetic model; `pattern` has 0 for a full and 1 for a sliding layer, layer 0 is dense.

    Heads have the released 192 and 128 rows.
    """

    hidden_size: int
    pattern: tuple[int, ...]
    num_attention_heads: int
    num_key_value_heads: int
    swa_num_attention_heads: int
    swa_num_key_value_heads: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int = 12  # "10" sorts before "2"
    num_experts_per_tok: int = 2
    vocab_size: int = 320
    mtp_layers: int = 2
    vision: bool = False
    audio: bool = False

    @property
    def num_hidden_layers(self) -> int:
        return len(self.pattern)

    @property
    def pro(self) -> bool:
        """V2.5-Pro and V2.6-Pro have as many kv heads on full as on sliding layers."""
        return self.num_key_value_heads == self.swa_num_key_value_heads

    @property
    def checkpoint_tp(self) -> int:
        return self.num_key_value_heads

    def full(self, prefix: str) -> bool:
        """Whether `model.layers.N.` is a full layer; MTP blocks are sliding."""
        return not prefix.startswith("model.mtp.") and self.pattern[int(prefix.split(".")[2])] == 0

    def heads(self, prefix: str) -> tuple[int, int]:
        """Query and kv heads of the layer whose keys start with `prefix`."""
        if self.full(prefix):
            return self.num_attention_heads, self.num_key_value_heads
        return self.swa_num_attention_heads, self.swa_num_key_value_heads


# Attention is real but for the number of query heads: few, but so many that the scale rows of a full layer fit one
# shard count only, as they do in the releases: FLASH 36 rows for 4352, PRO 72 for 8704, TP2 18 for 2176.
# hidden 160 leaves a partial column block and is a multiple of 32, which MXFP4 needs.
FLASH = Shape(160, (0, 1, 0), 16, 4, 16, 8, intermediate_size=384, moe_intermediate_size=96)
OMNI = replace(FLASH, vision=True, audio=True)
# transformers' V2-Flash class reads no layer pattern: layer 0 and every sixth layer are full.
NATIVE = replace(FLASH, pattern=(0, 1, 1, 1, 1, 0), mtp_layers=1)
PRO = Shape(160, (0, 1, 0), 32, 8, 32, 8, intermediate_size=320, moe_intermediate_size=64, mtp_layers=1)
TP2 = Shape(160, (0, 1, 0), 8, 2, 8, 4, intermediate_size=200, moe_intermediate_size=160, mtp_layers=1)


# ---------------------------------------------------------------- FP8 and MXFP4


def e4m3_value(byte: int) -> float:
    """Sign, 4 exponent bits with bias 7, 3 fraction bits; exponent 0 is subnormal, only S.1111.111 is NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, fraction = byte >> 3 & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (8 + fraction) * 2.0 ** (exponent - 10)


E4M3 = np.array([e4m3_value(byte) for byte in range(256)], np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def encode_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and fp32 scales of one grid of 128 x 128 blocks that starts at row 0; scale amax / 448, 1 for zeros."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = torch.ones(math.ceil(x.shape[0] / BLOCK), math.ceil(x.shape[1] / BLOCK))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(BLOCK * i, BLOCK * (i + 1)), slice(BLOCK * j, BLOCK * (j + 1)))
            amax = x[block].abs().max()
            if amax > 0:
                scale[i, j] = amax / 448
            codes[block] = (x[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


def decode_fp8(codes: Tensor, row_scales: list[np.ndarray]) -> Tensor:
    """fp32 codes times scales, row by row; `row_scales[r]` holds the scales of the column blocks of row r."""
    assert len(row_scales) == codes.shape[0]
    result = np.empty(codes.shape, np.float32)
    for r, row in enumerate(codes.view(torch.uint8).numpy()):
        result[r] = E4M3[row] * row_scales[r].repeat(BLOCK)[: codes.shape[1]]
    return torch.from_numpy(result)


def decode_fp8_plain(codes: Tensor, scale: Tensor) -> Tensor:
    grid = scale.numpy()
    return decode_fp8(codes, [grid[r // BLOCK] for r in range(codes.shape[0])])


def random_mxfp4(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Packed codes [rows, columns / 2] and E8M0 scales [rows, columns / 32], both uint8.

    The blocks are canonical, as those of the releases: the largest magnitude of each is 4 or 6. Both zeros occur.
    """
    random = np.random.default_rng(seed)
    magnitude = random.integers(0, 8, (rows, columns // 32, 32))
    largest = random.integers(6, 8, (rows, columns // 32, 1))  # code 6 is the value 4, code 7 the value 6
    magnitude = np.minimum(magnitude, largest)
    magnitude[..., random.integers(0, 32)] = largest[..., 0]
    codes = (magnitude + 8 * random.integers(0, 2, magnitude.shape)).astype(np.uint8).reshape(rows, columns)
    packed = np.zeros((rows, columns // 2), np.uint8)
    for i in range(columns // 2):
        packed[:, i] = codes[:, 2 * i] | codes[:, 2 * i + 1] << 4  # low nibble: the earlier element
    return torch.from_numpy(packed), torch.from_numpy(random.integers(112, 125, (rows, columns // 32), np.uint8))


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [rows, 2 * packed columns]: element 2i is the low, 2i + 1 the high nibble; times 2^(byte - 127)."""
    result = np.empty((packed.shape[0], 2 * packed.shape[1]), np.float32)
    for r, (codes, exponents) in enumerate(zip(packed.numpy(), scale.numpy(), strict=True)):
        result[r, 0::2] = E2M1[codes & 15]
        result[r, 1::2] = E2M1[codes >> 4]
        for b, byte in enumerate(exponents):
            factor = np.float32(math.nan if byte == 255 else math.ldexp(1.0, int(byte) - 127))
            result[r, 32 * b : 32 * (b + 1)] *= factor
    return torch.from_numpy(result)


# ---------------------------------------------------------------- text attention


def head(x: Tensor, n: int, dim: int) -> Tensor:
    return x[n * dim : (n + 1) * dim]


def shards_of(q: Tensor, k: Tensor, v: Tensor, shards: int) -> list[Tensor]:
    """The tensor-parallel shards [Q_t | K_t | V_t]; shard t owns the t-th part of the query and of the kv heads."""
    heads, kv_heads = q.shape[0] // HEAD_DIM // shards, k.shape[0] // HEAD_DIM // shards
    result = []
    for t in range(shards):
        rows = [head(q, t * heads + h, HEAD_DIM) for h in range(heads)]
        rows += [head(k, t * kv_heads + n, HEAD_DIM) for n in range(kv_heads)]
        rows += [head(v, t * kv_heads + n, V_HEAD_DIM) for n in range(kv_heads)]
        result.append(torch.cat(rows))
    return result


def split_shards(rows: Tensor, heads: int, kv_heads: int, shards: int) -> dict[str, Tensor]:
    """q, k, v from stacked shards: every head is looked up where its shard keeps it."""
    own, own_kv = heads // shards, kv_heads // shards
    shard_rows = own * HEAD_DIM + own_kv * (HEAD_DIM + V_HEAD_DIM)
    assert rows.shape[0] == shards * shard_rows
    q, k, v = [], [], []
    for h in range(heads):
        start = (h // own) * shard_rows + (h % own) * HEAD_DIM
        q.append(rows[start : start + HEAD_DIM])
    for n in range(kv_heads):
        keys = (n // own_kv) * shard_rows + own * HEAD_DIM
        values_ = keys + own_kv * HEAD_DIM
        k.append(rows[keys + (n % own_kv) * HEAD_DIM :][:HEAD_DIM])
        v.append(rows[values_ + (n % own_kv) * V_HEAD_DIM :][:V_HEAD_DIM])
    return {"q": torch.cat(q), "k": torch.cat(k), "v": torch.cat(v)}


def store_qkv(qkv: dict[str, Tensor], shards: int, fp8: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One fused tensor of `shards` shards, each with its own scale grid; one shard is the contiguous [Q; K; V]."""
    heads, kv_heads = qkv["q"].shape[0] // HEAD_DIM, qkv["k"].shape[0] // HEAD_DIM
    parts = shards_of(qkv["q"], qkv["k"], qkv["v"], shards)
    if not fp8:
        weight = torch.cat(parts).bfloat16()
        return {"qkv_proj.weight": weight}, split_shards(weight.float(), heads, kv_heads, shards)
    encoded = [encode_fp8(part) for part in parts]
    weight, scale = torch.cat([codes for codes, _ in encoded]), torch.cat([part for _, part in encoded])
    shard_rows = weight.shape[0] // shards
    scale_rows = math.ceil(shard_rows / BLOCK)
    grid = scale.numpy()
    row_scales = [grid[t * scale_rows + r // BLOCK] for t in range(shards) for r in range(shard_rows)]
    decoded = split_shards(decode_fp8(weight, row_scales), heads, kv_heads, shards)
    return {"qkv_proj.weight": weight, "qkv_proj.weight_scale_inv": scale}, decoded


def store_flash_kv(k: Tensor, v: Tensor, strip: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """K and V of a full V2-Flash layer. Each 192-row K head has two scale rows of its own.

    `strip`: K and V of a head were quantised as 320 rows with three scale rows; K keeps the first two, V the third,
    so that V rows 0-63 of the head need the second. Otherwise V has an ordinary grid.
    """
    parts: dict[str, list[Tensor]] = {"k": [], "k_scale": [], "v": [], "v_scale": []}
    kv_heads = k.shape[0] // HEAD_DIM
    for n in range(kv_heads):
        k_head, v_head = head(k, n, HEAD_DIM), head(v, n, V_HEAD_DIM)
        if strip:
            codes, scale = encode_fp8(torch.cat([k_head, v_head]))
            pieces = (codes[:HEAD_DIM], scale[:2], codes[HEAD_DIM:], scale[2:])
        else:
            pieces = (*encode_fp8(k_head), *encode_fp8(v_head))
        for name, piece in zip(parts, pieces, strict=True):
            parts[name].append(piece)
    whole = {name: torch.cat(pieces) for name, pieces in parts.items()}
    k_scale, v_scale = whole["k_scale"].numpy(), whole["v_scale"].numpy()
    k_rows, v_rows = [], []
    for n in range(kv_heads):
        k_rows += [k_scale[2 * n + (0 if i < 128 else 1)] for i in range(HEAD_DIM)]
        for i in range(V_HEAD_DIM):
            v_rows.append(k_scale[2 * n + 1] if strip and i < 64 else v_scale[n])
    stored = {"k_proj.weight": whole["k"], "k_proj.weight_scale_inv": whole["k_scale"]}
    stored |= {"v_proj.weight": whole["v"], "v_proj.weight_scale_inv": whole["v_scale"]}
    return stored, {"k": decode_fp8(whole["k"], k_rows), "v": decode_fp8(whole["v"], v_rows)}


def store_plain(weight: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    codes, scale = encode_fp8(weight)
    return {name: codes, f"{name}_scale_inv": scale}, decode_fp8_plain(codes, scale)


def store_attention(
    qkv: dict[str, Tensor], shape: Shape, form: str, full: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stored names (below `self_attn.`) and the decoded q, k, v of one layer."""
    quantised = not form.startswith("bf16")
    if form.endswith("-fused") or form.endswith("-contiguous"):
        return store_qkv(qkv, shape.checkpoint_tp if form.endswith("-fused") else 1, quantised)
    if not quantised:
        stored = {f"{name}_proj.weight": x.bfloat16() for name, x in qkv.items()}
        return stored, {name: stored[f"{name}_proj.weight"].float() for name in qkv}
    if form in FLASH_FORMS and full:
        stored, decoded = store_flash_kv(qkv["k"], qkv["v"], strip=form == "fp8-flash")
    else:
        stored, decoded = {}, {}
    for name in [name for name in qkv if name not in decoded]:
        pair, decoded[name] = store_plain(qkv[name], f"{name}_proj.weight")
        stored |= pair
    return stored, decoded


# ---------------------------------------------------------------- a whole checkpoint


def plain_dtype(key: str, form: str) -> torch.dtype:
    """Of a tensor that no form quantises. The released towers are BF16; two other dtypes here must be kept too."""
    if key.endswith("mlp.gate.weight"):
        return torch.bfloat16 if form == "mxfp4-fused" else torch.float32
    if key.endswith(("e_score_correction_bias", "attn.sinks")):
        return torch.float32
    return torch.float16 if key == "speech_embeddings.1.weight" else torch.bfloat16


def store(logical: dict[str, Tensor], shape: Shape, form: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The stored tensors of a form, and by split key the fp32 values that these bytes mean.

    The experts of "mxfp4-fused" are random canonical blocks and have nothing to do with `logical` but its keys.
    """
    if form not in FORMS or (form in FLASH_FORMS and (shape.pro or shape.vision or shape.audio)):
        raise ValueError(f"no {form} of {shape}")
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for key, value in logical.items():
        text = key.startswith("model.")
        if text and key.endswith(("k_proj.weight", "v_proj.weight")):
            continue  # came with q_proj
        if text and key.endswith("q_proj.weight"):
            prefix = key.removesuffix("q_proj.weight")
            qkv = {name: logical[f"{prefix}{name}_proj.weight"] for name in ("q", "k", "v")}
            pieces, means = store_attention(qkv, shape, form, shape.full(prefix))
            stored |= {prefix + name: piece for name, piece in pieces.items()}
            decoded |= {f"{prefix}{name}_proj.weight": x for name, x in means.items()}
        elif form == "mxfp4-fused" and ".mlp.experts." in key:
            seed = zlib.crc32(key.encode() + value.numpy().tobytes())
            stored[key], stored[f"{key}_scale"] = random_mxfp4(value.shape[0], value.shape[1], seed)
            decoded[key] = decode_mxfp4(stored[key], stored[f"{key}_scale"])
        elif text and key.endswith(FP8_SUFFIXES) and not form.startswith("bf16"):
            pieces, decoded[key] = store_plain(value, key)
            stored |= pieces
        else:
            stored[key] = value.to(plain_dtype(key, form))
            decoded[key] = stored[key].float()
    return {key: x.contiguous() for key, x in stored.items()}, {key: decoded[key] for key in logical}
