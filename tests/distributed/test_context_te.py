"""The `te` backend of models that several processes share, against a stand-in for Transformer Engine."""

from pathlib import Path
from typing import Any

import pytest
import te_stand_in
import torch
import torch.distributed as dist
from ranks import run_ranks
from te_stand_in import BOUNDS, packed, pair, run
from tiny_folders import saved
from tiny_text import VOCAB, assert_same_gradients, gradients, relative, tiny_config, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from automimo.attention import share_layout
from automimo.backend import BackendConfig
from automimo.checkpoint import CheckpointReader
from automimo.distributed.mesh import build_meshes, infer_sizes
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.storage import SourceOptions, StoredCheckpoint
from automimo.mimo_v2_flash.weights import load_weights
from automimo.parallelize import ParallelConfig, parallelize


def shared_bounds(ranks: int) -> list[int]:
    return [0, 2 * ranks, 8 * ranks, 8 * ranks, 22 * ranks]


def on_ranks(rank: int, changes: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor], list[tuple[int, bool]]]:
    """Logits of this rank's tokens and their places, gradients summed over the ranks, and what the cores got."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = te_stand_in.install(monkeypatch)
        _, ours = pair(**changes)
        for block in ours.model.layers.values():
            block.self_attn.setup_cp_attention(mesh)
        inputs = packed(shared_bounds(ranks))
        layout = share_layout(shared_bounds(ranks), window=None, size=ranks, rank=rank, device="cpu")
        inputs["input_ids"] = inputs["input_ids"][:, layout.places]
        logits = ours(**inputs, cp_size=ranks, cp_rank=rank).logits
        whole = torch.linspace(-1, 1, shared_bounds(ranks)[-1] * VOCAB).view(-1, VOCAB)
        (logits[0] * whole[layout.places]).sum().backward()
        grads = gradients(ours)
        for gradient in grads.values():
            dist.all_reduce(gradient)
        seen = [(core.groups, core.calls[0]["cu_seqlens_q"].tolist() == shared_bounds(ranks)) for core in made]
    return logits[0].detach(), layout.places, grads, seen


@pytest.mark.parametrize(
    ("ranks", "changes", "groups"),
    [
        (2, {}, [2, 2, 2, 2]),  # one key/value head in full layers: both ranks get a copy
        (4, {"v_head_dim": 12, "sliding_window": 30}, [4, 4, 4, 4]),
    ],
)
def test_ranks_compute_what_sdpa_computes_alone(ranks: int, changes: dict[str, Any], groups: list[int]) -> None:
    reference = tiny_model(tiny_config(**changes))
    expected, expected_grads = run(reference, **packed(shared_bounds(ranks)))
    expected_grads = {name: g for name, g in expected_grads.items() if not name.endswith("attention_sink_bias")}
    for logits, places, grads, seen in run_ranks(ranks, on_ranks, changes):
        assert relative(logits, expected[0, places]) < 1e-5
        assert_same_gradients(grads, expected_grads)
        assert seen == [(number, True) for number in groups]


# -- a model whose parameters are sharded ------------------------------------------------------------------------------


def sharded(rank: int, folder: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and sinks of a model that is laid out without memory and filled from a folder."""
    meshes = build_meshes(infer_sizes(dist.get_world_size(), data=2), "cpu")
    with pytest.MonkeyPatch.context() as monkeypatch:
        te_stand_in.install(monkeypatch)
        with torch.device("meta"):
            model = MiMoV2FlashForCausalLM(tiny_config(), backend=BackendConfig(attn="te"))
        parallelize(model, meshes, ParallelConfig(dtype=dtype))
        model.to_empty(device="cpu")
        with CheckpointReader(folder) as reader:
            load_weights(model, StoredCheckpoint(reader, model.config, SourceOptions()))
        logits = model.train()(**packed(BOUNDS)).logits
        logits.float().square().sum().backward()
        return logits.detach(), {name: buffer for name, buffer in model.named_buffers() if "softmax" in name}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_sharded_models_keep_whole_sinks_in_fp32(tmp_path: Path, dtype: torch.dtype, bound: float) -> None:
    reference = tiny_model()
    folder = saved(tmp_path / "model", reference)
    expected = reference(**packed(BOUNDS)).logits
    for logits, sinks in run_ranks(2, sharded, str(folder), dtype):
        assert relative(logits, expected) < bound  # bf16 rounds weights and every layer: 0.8 % here
        assert len(sinks) == 4
        for name, sink in sinks.items():
            layer = name.split(".")[2]
            assert sink.dtype == torch.float32
            assert torch.equal(sink, reference.model.layers[layer].self_attn.attention_sink_bias)
