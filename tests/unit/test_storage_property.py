"""read(write(x)) = x over random shapes, shards and layouts; and what is written is found again from headers alone."""

from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from automimo.checkpoint import CheckpointReader
from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage import (
    SourceOptions,
    StoredCheckpoint,
    StoredMatrix,
    encode_group,
    stored_tensors,
    stored_together,
    target_form,
    target_matrices,
)
from automimo.mimo_v2_flash.storage.steps import rounding_steps


@st.composite
def models(draw: st.DrawFn) -> MiMoV2FlashConfig:
    """Two layers, one full and one sliding, whose heads are multiples of a number of shards."""
    shards = draw(st.sampled_from([1, 2, 3, 4]))
    kv_full, kv_sliding = shards, shards * draw(st.sampled_from([1, 2]))
    group = draw(st.integers(1, 3))
    model_class = draw(st.sampled_from([MiMoV2Config, MiMoV2FlashConfig]))
    return model_class(
        vocab_size=8,
        hidden_size=draw(st.sampled_from([32, 96, 160, 256])),
        intermediate_size=draw(st.integers(1, 300)),
        moe_intermediate_size=32 * draw(st.integers(1, 5)),
        num_hidden_layers=2,
        hybrid_layer_pattern=[0, 1],
        moe_layer_freq=[0, 1],
        num_attention_heads=kv_full * group,
        num_key_value_heads=kv_full,
        swa_num_attention_heads=kv_sliding * group,
        swa_num_key_value_heads=kv_sliding,
        head_dim=draw(st.sampled_from([8, 64, 100, 192])),
        v_head_dim=draw(st.sampled_from([8, 72, 128])),
        swa_head_dim=draw(st.sampled_from([8, 64, 100, 192])),
        swa_v_head_dim=draw(st.sampled_from([8, 72, 128])),
        n_routed_experts=2,
        num_experts_per_tok=1,
    )


def split_tensors(config: MiMoV2FlashConfig, seed: int) -> dict[str, Tensor]:
    """q, k, v of a full, a sliding and an MTP attention, a dense MLP, an expert and a norm, on the BF16 grid."""
    generator = torch.Generator().manual_seed(seed)
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    full = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.v_head_dim)
    sliding = (
        *(config.swa_num_attention_heads, config.swa_num_key_value_heads),
        *(config.swa_head_dim, config.swa_v_head_dim),
    )
    for prefix, (heads, kv, dim, v_dim) in (
        ("model.layers.0", full),
        ("model.layers.1", sliding),
        ("model.mtp.layers.0", sliding),
    ):
        for part, rows in (("q", heads * dim), ("k", kv * dim), ("v", kv * v_dim)):
            shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (rows, hidden)
    shapes["model.layers.0.mlp.down_proj.weight"] = (hidden, config.intermediate_size)
    shapes["model.layers.1.mlp.experts.1.down_proj.weight"] = (hidden, config.moe_intermediate_size)
    return {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in shapes.items()}


def written(folder: Path, tensors: dict[str, Tensor], matrices: dict[str, StoredMatrix]) -> None:
    stored = {}
    for group in stored_together(matrices.values()):
        values = [tensors[matrix.key] for matrix in group]
        for tensor, value in zip(stored_tensors(group), encode_group(group, values), strict=True):
            assert (tuple(value.shape), tensor.key in stored) == (tensor.shape, False)
            stored[tensor.key] = value.contiguous()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=models(),
    quantisation=st.sampled_from(["none", "fp8", "mxfp4"]),
    layout=st.sampled_from(["split", "fused"]),
    v_scales=st.sampled_from(["strip", "own"]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_what_is_written_reads_back(config, quantisation, layout, v_scales, seed, data) -> None:
    tensors = split_tensors(config, seed)
    kv = config.num_key_value_heads
    tp = data.draw(st.sampled_from([t for t in range(1, kv + 1) if kv % t == 0])) if layout == "fused" else None
    form = target_form(config, quantisation, layout=layout, tp=tp, v_scales=v_scales)
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    matrices = target_matrices(shapes, dict.fromkeys(shapes, "BF16"), config, form)
    with TemporaryDirectory() as name:
        folder = Path(name)
        written(folder, tensors, matrices)
        with CheckpointReader(folder) as reader:
            stored = StoredCheckpoint(reader, config, SourceOptions(tp=tp, v_scales=v_scales))
            assert stored.matrices == matrices
            for key, tensor in tensors.items():
                rows = tensor.shape[0]
                whole = stored.read(key, torch.float32)
                start = data.draw(st.integers(0, rows), label="start")
                stop = data.draw(st.integers(start, rows), label="stop")
                assert torch.equal(stored.read(key, torch.float32, start=start, stop=stop), whole[start:stop])
                if matrices[key].encoding == "plain":
                    assert torch.equal(stored.read(key), tensor)
                else:
                    # Half a step of FP8; MXFP4 rounds by half a step too, but up to 8 becomes 6, a whole step of 2.
                    limit = 0.5 + 2**-10 if matrices[key].encoding == "fp8" else 1.0 + 2**-10
                    assert rounding_steps(reader, matrices[key], tensor.float(), 0, rows) <= limit
            # Writing what was read changes nothing: the codes already are what the values round to.
            again = {key: stored.read(key, torch.float32) for key in tensors}
        for key, matrix in matrices.items():
            if matrix.encoding == "mxfp4":
                codes, scales = encode_group((matrix,), [again[key]])
                with TemporaryDirectory() as other:
                    save_file({key: codes, f"{key}_scale": scales}, Path(other) / "model.safetensors")
                    with CheckpointReader(other) as reader:
                        values = StoredCheckpoint(reader, config).read(key, torch.float32)
                assert torch.equal(values, again[key])


@settings(max_examples=200, deadline=None)
@given(config=models(), data=st.data())
def test_every_row_has_one_place_and_one_scale(config, data) -> None:
    """The rows of q, k and v fill the fused matrix exactly, and each has the scale of its block in its shard."""
    kv = config.num_key_value_heads
    tp = data.draw(st.sampled_from([t for t in range(1, kv + 1) if kv % t == 0]))
    shapes = {key: tuple(t.shape) for key, t in split_tensors(config, 0).items()}
    form = target_form(config, "fp8", layout="fused", tp=tp)
    matrices = target_matrices(shapes, dict.fromkeys(shapes, "BF16"), config, form)
    for prefix in ("model.layers.0", "model.layers.1"):
        parts = [matrices[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"]
        total = parts[0].weight.shape[0]
        place: dict[int, int] = {}
        for matrix in parts:
            stored_rows = [first + i for first, count in matrix.rows for i in range(count)]
            scale_rows = [strip.scale_row for strip in matrix.strips for _ in range(strip.rows)]
            assert len(stored_rows) == len(scale_rows) == matrix.shape[0]
            place.update(zip(stored_rows, scale_rows, strict=True))
        assert sorted(place) == list(range(total))
        shard = total // tp
        expected = {row: (row // shard) * ceil(shard / 128) + (row % shard) // 128 for row in range(total)}
        assert place == expected
