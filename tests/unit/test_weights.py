"""Folders of the model: written and read back, dtypes, carried parts, opened by transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_folders import (
    ROUTER,
    SIDE_FILES,
    SINK,
    assert_same_state,
    carried_tensors,
    full_source,
    raw,
    rewrite,
    saved,
    tensors_of,
)
from tiny_text import VOCAB, relative, tiny_config, tiny_model
from torch import Tensor, nn
from transformers.models.mimo_v2_flash import MiMoV2FlashForCausalLM as NativeModel

from automimo.mimo_v2_flash.config import MiMoV2Config
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, MiMoV2ForCausalLM
from automimo.mimo_v2_flash.weights import checkpoint_places, is_carried

# -- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", [None, 3000])
def test_saved_and_loaded_bit_for_bit(dtype: torch.dtype, shard: int | None, tmp_path: Path) -> None:
    # Without a source, sinks are stored in the dtype of the matrices: zero is exact in all of them.
    model = tiny_model(dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if SINK in name:
                parameter.copy_(parameter.to(dtype))
    folder = saved(tmp_path / "out", model, **({} if shard is None else {"max_shard_bytes": shard}))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shard is None:
        assert shards == ["model.safetensors"]
    else:
        assert len(shards) > 5
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        where = {key: path for path in shards for key in load_file(folder / path)}
        assert index["weight_map"] == where
        assert index["metadata"]["total_size"] == sum(len(raw(t)) for t in tensors_of(folder).values())
    again = MiMoV2FlashForCausalLM.from_pretrained(str(folder))
    assert_same_state(again, model)
    assert again.config == MiMoV2FlashForCausalLM.config_class.from_pretrained(folder)
    assert again.source_folder == folder
    assert {p.device.type for p in again.parameters()} == {"cpu"}
    ids = torch.randint(0, VOCAB, (1, 12))
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


def test_every_key_and_its_orientation_with_more_than_ten_experts(tmp_path: Path) -> None:
    """Expert 10 sorts before expert 2 as text."""
    model = tiny_model(tiny_config(n_routed_experts=12, attention_bias=True))
    found = tensors_of(saved(tmp_path / "out", model))
    state = model.state_dict()
    expected: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("gate_and_up_projs"):
            prefix = name.removesuffix("gate_and_up_projs")
            assert tensor.shape == (12, 32, 2 * 16)
            for e in range(12):
                expected[f"{prefix}{e}.gate_proj.weight"] = tensor[e, :, :16].T
                expected[f"{prefix}{e}.up_proj.weight"] = tensor[e, :, 16:].T
        elif name.endswith("down_projs"):
            prefix = name.removesuffix("down_projs")
            for e in range(12):
                expected[f"{prefix}{e}.down_proj.weight"] = tensor[e].T
        else:
            expected[name] = tensor
    assert found.keys() == expected.keys()
    assert "model.layers.1.mlp.experts.11.up_proj.weight" in found
    assert "model.layers.0.self_attn.q_proj.bias" in found
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    again = MiMoV2FlashForCausalLM.from_pretrained(str(tmp_path / "out"))
    assert_same_state(again, model)


def test_the_table_and_its_inverse() -> None:
    state = tiny_model(tiny_config(n_routed_experts=12)).state_dict()
    places = checkpoint_places(state)
    assert {place.parameter for place in places.values()} == set(state)
    assert sum(place.view(state[place.parameter]).numel() for place in places.values()) == sum(
        tensor.numel() for tensor in state.values()
    )
    for key, place in places.items():
        stack = re.sub(r"(\.experts)\.\d+\.(gate|up)_proj\.weight$", r"\1.gate_and_up_projs", key)
        assert re.sub(r"(\.experts)\.\d+\.down_proj\.weight$", r"\1.down_projs", stack) == place.parameter
        assert place.view(state[place.parameter]).untyped_storage().data_ptr() == (
            state[place.parameter].untyped_storage().data_ptr()
        )


def test_nothing_keeps_what_was_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "out")
    poisoned = []

    def to_empty(self: nn.Module, **options: Any) -> nn.Module:
        nn.Module.to_empty(self, **options)
        with torch.no_grad():
            for tensor in (*self.parameters(), *(b for b in self.buffers() if b.is_floating_point())):
                poisoned.append(tensor.fill_(float("nan")))
        return self

    monkeypatch.setattr(MiMoV2FlashForCausalLM, "to_empty", to_empty, raising=False)
    model = MiMoV2FlashForCausalLM.from_pretrained(str(folder))
    assert len(poisoned) == len(model.state_dict())
    assert all(bool(tensor.isfinite().all()) for tensor in (*model.parameters(), *model.buffers()))
    assert_same_state(model, tiny_model())


def test_loading_keeps_requires_grad_and_marks_sinks_frozen(tmp_path: Path) -> None:
    model = MiMoV2FlashForCausalLM.from_pretrained(str(saved(tmp_path / "out")))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"model.layers.{i}.self_attn.{SINK}" for i in range(4)}


def test_fp64_and_fp16_files_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    exact = tensors_of(folder)

    def widen(tensors: dict[str, Tensor]) -> None:
        for i, key in enumerate(sorted(tensors)):
            tensors[key] = tensors[key].to((torch.float64, torch.float16, torch.bfloat16)[i % 3])

    rewrite(folder, widen)
    stored = tensors_of(folder)
    state = MiMoV2FlashForCausalLM.from_pretrained(str(folder)).state_dict()
    places = checkpoint_places(state)
    assert places.keys() == exact.keys()
    for key, place in places.items():
        assert torch.equal(place.view(state[place.parameter]), stored[key].float()), key


# -- dtypes of what is written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
def test_dtype_of_every_written_tensor(dtype: torch.dtype, model_dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model(dtype=model_dtype)
    state = model.state_dict()
    folder = saved(tmp_path / "out", model, dtype=dtype)
    found = tensors_of(folder)
    for key, tensor in found.items():
        assert tensor.dtype == (torch.float32 if key.endswith(ROUTER) else dtype), key
    for key, place in checkpoint_places(state).items():
        assert torch.equal(found[key], place.view(state[place.parameter]).to(found[key].dtype)), key
    values = json.loads((folder / "config.json").read_text())
    assert values["dtype"] == str(dtype).removeprefix("torch.")
    assert values["architectures"] == ["MiMoV2FlashForCausalLM"]
    # The model itself is as it was.
    assert {p.dtype for p in model.parameters()} == {model_dtype, torch.float32}


def test_the_default_dtype_is_that_of_the_model(tmp_path: Path) -> None:
    found = tensors_of(saved(tmp_path / "out", tiny_model(dtype=torch.bfloat16)))
    assert {t.dtype for key, t in found.items() if not key.endswith(ROUTER)} == {torch.bfloat16}


# -- a source that holds more than the text model ---------------------------------------------------------------------


@pytest.mark.parametrize("shard", [None, 2000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None])
def test_a_text_run_loses_nothing(dtype: torch.dtype | None, shard: int | None, tmp_path: Path) -> None:
    source = full_source(tmp_path / "source")
    model = MiMoV2FlashForCausalLM.from_pretrained(str(source), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.001)
    options = {} if shard is None else {"max_shard_bytes": shard}
    out = saved(tmp_path / "out", model, dtype=dtype, **options)
    found, carried = tensors_of(out), carried_tensors()
    for key, tensor in carried.items():
        assert found[key].dtype == tensor.dtype, key
        assert found[key].shape == tensor.shape, key
        assert raw(found[key]) == raw(tensor), key
    assert found.keys() == tensors_of(source).keys()
    for name, content in SIDE_FILES.items():
        assert (out / name).read_bytes() == content
    state = model.state_dict()
    for key, place in checkpoint_places(state).items():
        if key.endswith(("mlp.gate.weight", SINK)):
            stored = torch.bfloat16
        elif key.endswith("correction_bias"):
            stored = torch.float32
        else:
            stored = dtype or torch.float32
        assert found[key].dtype == stored, key
        assert torch.equal(found[key], place.view(state[place.parameter]).to(stored)), key
    if shard is not None:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
    again = MiMoV2FlashForCausalLM.from_pretrained(str(out))
    assert again.lm_head.weight.dtype == (dtype or torch.float32)


def test_an_explicit_source_replaces_the_remembered_one(tmp_path: Path) -> None:
    model = tiny_model()
    out = saved(tmp_path / "out", model, source=full_source(tmp_path / "source"), dtype=torch.float32)
    assert raw(tensors_of(out)["visual.blocks.0.attn.sinks"]) == raw(carried_tensors()["visual.blocks.0.attn.sinks"])
    plain = saved(
        tmp_path / "plain", MiMoV2FlashForCausalLM.from_pretrained(str(out)), source=saved(tmp_path / "small")
    )
    assert not [key for key in tensors_of(plain) if is_carried(key)]


def test_the_tokenizer_wins_over_the_source(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, save_directory: str, /) -> None:
            (Path(save_directory) / "tokenizer.json").write_text("ours")

    model = MiMoV2FlashForCausalLM.from_pretrained(str(full_source(tmp_path / "source")))
    model.save_pretrained(tmp_path / "out", tokenizer=Tokenizer())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "ours"
    assert (tmp_path / "out" / "chat_template.jinja").read_bytes() == SIDE_FILES["chat_template.jinja"]


def test_a_checkpointer_takes_over(tmp_path: Path) -> None:
    calls = []

    class Checkpointer:
        def save_model(self, **arguments: Any) -> None:
            calls.append(arguments)

    model = tiny_model()
    model.save_pretrained(tmp_path / "out", Checkpointer(), "tokenizer", peft_config="lora")  # type: ignore[arg-type]
    expected = {"model": model, "weights_path": str(tmp_path / "out"), "peft_config": "lora", "tokenizer": "tokenizer"}
    assert calls == [expected]
    assert not (tmp_path / "out").exists()


def test_the_export_drops_what_no_longer_holds(tmp_path: Path) -> None:
    config = MiMoV2Config(**{**tiny_config().to_diff_dict(), "quantization_config": {"quant_method": "fp8"}})
    assert config.attention_projection_layout == "split"
    config.attention_projection_layout = "fused_qkv"
    model = MiMoV2ForCausalLM(config)
    model.initialize_weights(dtype=torch.float32)
    model.save_pretrained(tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["attention_projection_layout"] == "split"
    assert "quantization_config" not in values
    assert values["architectures"] == ["MiMoV2ForCausalLM"]
    assert values["model_type"] == "mimo_v2"
    assert_same_state(MiMoV2ForCausalLM.from_pretrained(str(tmp_path / "out")), model)


# -- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [None, 4000])
def test_transformers_opens_our_folder(shard: int | None, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(add_full_attention_sink_bias=False, n_routed_experts=12)).eval()
    folder = saved(tmp_path / "out", model, **({} if shard is None else {"max_shard_bytes": shard}))
    twin, info = NativeModel.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not [key for key, value in info.items() if value]
    ids = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = model(ids).logits, twin.eval()(ids, use_cache=False).logits
    assert relative(ours, theirs) < 1e-5
    again = MiMoV2FlashForCausalLM.from_pretrained(str(folder)).eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, ours)
