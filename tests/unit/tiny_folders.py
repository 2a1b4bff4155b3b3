"""Checkpoint folders of very small models, made and looked at with the safetensors library, not with our own code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_text import tiny_model
from torch import Tensor, nn

from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM

ROUTER = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
SINK = "attention_sink_bias"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the safetensors library."""
    result: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found = load_file(path)
        assert not result.keys() & found.keys()
        result.update(found)
    return result


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def saved(folder: Path, model: MiMoV2FlashForCausalLM | None = None, **options: Any) -> Path:
    (model or tiny_model()).save_pretrained(folder, **options)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the tensors of a single-file folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def assert_same_state(ours: nn.Module, reference: nn.Module) -> None:
    state = reference.state_dict()
    assert ours.state_dict().keys() == state.keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == state[name].dtype, name
        assert torch.equal(tensor, state[name]), name


def carried_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise(dtype: torch.dtype, *shape: int) -> Tensor:
        size = torch.empty(shape, dtype=dtype).nbytes
        codes = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        return codes.view(dtype).view(shape)  # any bits, NaNs too

    return {
        "model.mtp.layers.0.eh_proj.weight": noise(torch.bfloat16, 6, 12),
        "model.mtp.layers.0.self_attn.o_proj.weight": noise(torch.float16, 10, 7),
        "model.mtp.layers.0.final_layernorm.weight": noise(torch.float32, 6),
        "visual.blocks.0.attn.sinks": noise(torch.bfloat16, 5),
        "visual.patch_embed.proj.weight": noise(torch.float16, 2, 3, 2, 2, 2),
        "audio_encoder.projection.mlp.0.weight": noise(torch.float32, 3, 5),
        "speech_embeddings.19.weight": noise(torch.uint8, 3, 3),
    }


SIDE_FILES = {
    "tokenizer.json": b'{"version": "1.0"}\n',
    "chat_template.jinja": "{{ messages }}\u00e9".encode(),
    "generation_config.json": b'{"eos_token_id": [1, 2]}',
    "preprocessor_config.json": b"\x00\xff not even JSON",
    "modeling_mimo_v2.py": b"raise RuntimeError('never run')\n",
    "dflash/config.json": b"{broken",
    "dflash/model.safetensors": b"\x01\x02\x03",
    "audio_tokenizer/mask_embedding.pt": b"pickle?",
}


def full_source(folder: Path, model: MiMoV2FlashForCausalLM | None = None) -> Path:
    """As released: router in bf16, bias in fp32, sinks in bf16, and the parts a text run does not know."""
    saved(folder, model or tiny_model(dtype=torch.bfloat16))

    def extend(tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            if key.endswith("mlp.gate.weight"):
                tensors[key] = tensors[key].to(torch.bfloat16)
        tensors.update(carried_tensors())

    rewrite(folder, extend)
    for name, content in SIDE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
