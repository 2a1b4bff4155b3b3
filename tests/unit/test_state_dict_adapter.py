"""The state-dict adapter: keys and views of the split layout, loads that write through, refusals; the lazy package."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_text import tiny_config, tiny_model
from torch import Tensor

from automimo.backend import BackendConfig
from automimo.checkpoint import StateDictAdapter
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.model import MODEL_CLASSES, MiMoV2FlashForCausalLM, MiMoV2ForCausalLM
from automimo.mimo_v2_flash.presets import preset_config
from automimo.mimo_v2_flash.state_dict_adapter import MiMoV2FlashStateDictAdapter

EXPERTS = 12  # expert 10 sorts before expert 2 as text


def make(seed: int = 0, **changes: Any) -> MiMoV2FlashForCausalLM:
    return tiny_model(tiny_config(n_routed_experts=EXPERTS, **changes), seed=seed)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_the_keys_are_those_of_a_saved_folder(tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    state = model.state_dict()
    converted = model.state_dict_adapter.to_hf(state)
    assert converted.keys() == stored.keys()
    for key, tensor in converted.items():
        assert torch.equal(tensor, stored[key]), key
    assert model.state_dict_adapter.get_hf_state_dict_keys(state) == list(converted)
    twelfth = "model.layers.1.mlp.experts.11.up_proj.weight"
    assert torch.equal(converted[twelfth], state["model.layers.1.mlp.experts.gate_and_up_projs"][11, :, 16:].T)


def test_everything_is_a_view() -> None:
    model = make()
    state = model.state_dict()
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    for tensor in model.state_dict_adapter.to_hf(state).values():
        assert tensor.untyped_storage().data_ptr() in storages
    for key, tensor in model.state_dict_adapter.to_hf(state).items():
        tensor.fill_(hash(key) % 97)
    for name, tensor in state.items():
        if not name.endswith("projs"):
            assert torch.equal(tensor, torch.full_like(tensor, hash(name) % 97))
    gate = state["model.layers.2.mlp.experts.gate_and_up_projs"][10, :, :16]
    assert torch.equal(gate, torch.full_like(gate, hash("model.layers.2.mlp.experts.10.gate_proj.weight") % 97))


def test_round_trip_from_a_shuffled_dictionary() -> None:
    model = make()
    state = model.state_dict()
    converted = {key: tensor.clone() for key, tensor in sorted(model.state_dict_adapter.to_hf(state).items())}
    back = model.state_dict_adapter.from_hf(converted)
    assert same(back, {name: state[name] for name in back})
    assert back.keys() == state.keys()
    fresh = make(seed=1)
    fresh.load_state_dict(back)
    assert same(fresh.state_dict(), state)
    # Whole tensors go through as they are.
    assert back["lm_head.weight"] is converted["lm_head.weight"]


def test_the_dtype_is_that_of_new_stacks() -> None:
    model = make()
    adapter = MiMoV2FlashStateDictAdapter(model.config, model.model.moe_config, BackendConfig())
    assert adapter.dtype == torch.bfloat16
    back = adapter.from_hf({key: t.clone() for key, t in adapter.to_hf(model.state_dict()).items()})
    for name, tensor in model.state_dict().items():
        expected = tensor.to(torch.bfloat16) if name.endswith("projs") else tensor
        assert back[name].dtype == expected.dtype
        assert torch.equal(back[name], expected), name
    assert model.state_dict_adapter.dtype == torch.float32  # the model hands on its own


@pytest.mark.parametrize("replaced", [False, True])
def test_a_load_writes_through(replaced: bool) -> None:
    source, model = make(seed=1), make()
    state = model.state_dict()
    with torch.no_grad():
        for tensor in state.values():
            tensor.fill_(float("nan"))
    adapter = model.state_dict_adapter
    assert adapter.supports_write_through_checkpoint_load
    destinations = adapter.to_hf(state, for_checkpoint_load=True)
    for key, tensor in source.state_dict_adapter.to_hf(source.state_dict()).items():
        if replaced and "experts" in key:
            destinations[key] = tensor.clone()  # a loader that reads into memory of its own
        else:
            destinations[key].copy_(tensor)
    loaded = adapter.from_hf(destinations)
    for name, tensor in loaded.items():
        assert tensor.data_ptr() == state[name].data_ptr(), name
    assert same(model.state_dict(), source.state_dict())
    # The model is let go of: the next dictionary makes new stacks.
    again = adapter.from_hf({key: tensor.clone() for key, tensor in destinations.items()})
    name = "model.layers.1.mlp.experts.down_projs"
    assert again[name].data_ptr() != state[name].data_ptr()


def test_excluded_keys() -> None:
    model = make()
    adapter = model.state_dict_adapter
    kept = adapter.to_hf(model.state_dict(), exclude_key_regex=r"model\.layers\.\d+\.mlp\.experts\.(1|11)\.|lm_head")
    everything = adapter.to_hf(model.state_dict())
    gone = everything.keys() - kept.keys()
    assert gone == {key for key in everything if ".experts.1." in key or ".experts.11." in key or "lm_head" in key}
    assert len(gone) == 3 * 2 * 3 + 1
    name = "model.layers.1.mlp.experts.down_projs"
    pairs = adapter.convert_single_tensor_to_hf(name, model.state_dict()[name], exclude_key_regex=r".*\.3\.down_proj")
    assert [key for key, _ in pairs] == [
        f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(EXPERTS) if e != 3
    ]


def test_a_single_tensor() -> None:
    model = make()
    adapter, state = model.state_dict_adapter, model.state_dict()
    [(key, tensor)] = adapter.convert_single_tensor_to_hf("lm_head.weight", state["lm_head.weight"])
    assert key == "lm_head.weight"
    assert tensor is state["lm_head.weight"]
    [(key, scalar)] = adapter.convert_single_tensor_to_hf("step", torch.tensor(3))
    assert (key, int(scalar)) == ("step", 3)
    pairs = dict(adapter.convert_single_tensor_to_hf("mlp.experts.gate_and_up_projs", torch.zeros(2, 5, 6)))
    assert list(pairs) == [f"mlp.experts.{e}.{part}_proj.weight" for e in range(2) for part in ("gate", "up")]
    assert {tuple(tensor.shape) for tensor in pairs.values()} == {(3, 5)}


def test_names_without_the_model_prefix() -> None:
    model = make()
    inner = model.model.state_dict()
    converted = model.state_dict_adapter.to_hf(inner)
    assert "layers.1.mlp.experts.11.gate_proj.weight" in converted
    assert same(model.state_dict_adapter.from_hf({k: t.clone() for k, t in converted.items()}), inner)


def test_parts_that_a_text_model_does_not_hold_are_left_out() -> None:
    model = make()
    converted = model.state_dict_adapter.to_hf(model.state_dict())
    extra = {
        "model.mtp.layers.0.self_attn.qkv_proj.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn),
        "visual.blocks.0.norm1.weight": torch.zeros(2),
        "audio_encoder.projection.mlp.0.weight": torch.zeros(2),
        "speech_embeddings.0.weight": torch.zeros(2, dtype=torch.uint8),
    }
    assert model.state_dict_adapter.from_hf({**converted, **extra}).keys() == model.state_dict().keys()


def test_a_dense_model_has_an_adapter_too() -> None:
    model = tiny_model(tiny_config(n_routed_experts=None))
    assert model.model.moe_config is None
    converted = model.state_dict_adapter.to_hf(model.state_dict())
    assert same(model.state_dict_adapter.from_hf(converted), model.state_dict())


def test_it_works_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = MiMoV2ForCausalLM(preset_config("v2.5", num_hidden_layers=2, hybrid_layer_pattern=[0, 1]))
    keys = model.state_dict_adapter.get_hf_state_dict_keys(model.state_dict())
    assert sum("experts" in key for key in keys) == 3 * 256
    converted = model.state_dict_adapter.to_hf(model.state_dict())
    assert converted["model.layers.1.mlp.experts.255.down_proj.weight"].shape == (4096, 2048)
    assert list(converted) == keys
    back = model.state_dict_adapter.from_hf(converted)
    assert {name: t.shape for name, t in back.items()} == {name: t.shape for name, t in model.state_dict().items()}


def test_the_attribute_follows_the_backend() -> None:
    model = MiMoV2FlashForCausalLM(tiny_config(), revision="abc")
    adapter = model.state_dict_adapter
    assert isinstance(adapter, StateDictAdapter)
    assert (adapter.config, adapter.moe_config) == (model.config, model.model.moe_config)
    assert (adapter.backend, adapter.revision) == (model.backend, "abc")
    without = MiMoV2FlashForCausalLM(tiny_config(), backend=BackendConfig(enable_hf_state_dict_adapter=False))
    assert not hasattr(without, "state_dict_adapter")
    assert without.state_dict().keys() == model.state_dict().keys()


# -- refusals ---------------------------------------------------------------------------------------------------------


def converted_state() -> tuple[MiMoV2FlashForCausalLM, dict[str, Tensor]]:
    model = make()
    return model, dict(model.state_dict_adapter.to_hf(model.state_dict()))


@pytest.mark.parametrize(
    ("key", "tensor", "words"),
    [
        ("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(4, 4), ["qkv_proj.weight", "checkpoint_tp_size"]),
        (
            "model.layers.0.mlp.up_proj.weight",
            torch.zeros(48, 32).to(torch.float8_e4m3fn),
            ["model.layers.0.mlp.up_proj.weight", "F8_E4M3"],
        ),
        (
            "model.layers.1.mlp.experts.0.up_proj.weight",
            torch.zeros(16, 16, dtype=torch.uint8),
            ["experts.0.up_proj.weight", "U8"],
        ),
        (
            "model.layers.1.mlp.experts.12.up_proj.weight",
            torch.zeros(16, 32),
            ["1 unexpected", "experts.12.up_proj.weight", "12 experts"],
        ),
        (
            "model.layers.1.mlp.experts.7.up_proj.weight",
            torch.zeros(32, 16),
            ["1 of the wrong shape", "experts.7.up_proj.weight: found [32, 16], expected [16, 32]"],
        ),
    ],
)
def test_tensors_that_do_not_fit(key: str, tensor: Tensor, words: list[str]) -> None:
    model, converted = converted_state()
    with pytest.raises(CheckpointError) as error:
        model.state_dict_adapter.from_hf({**converted, key: tensor})
    for word in words:
        assert word in str(error.value)


def test_a_missing_expert_is_named() -> None:
    model, converted = converted_state()
    for e in (4, 11):
        del converted[f"model.layers.3.mlp.experts.{e}.down_proj.weight"]
    with pytest.raises(CheckpointError) as error:
        model.state_dict_adapter.from_hf(converted)
    for word in ("2 missing", "model.layers.3.mlp.experts.{4..11}.down_proj.weight (2)", "12 experts"):
        assert word in str(error.value)


def test_experts_for_a_model_without_them() -> None:
    _, converted = converted_state()
    dense = tiny_model(tiny_config(n_routed_experts=None))
    with pytest.raises(CheckpointError, match="the model has no experts"):
        dense.state_dict_adapter.from_hf(converted)


@pytest.mark.parametrize(
    ("layout", "store"), [("split", None), ("split", "fp8"), ("fused_qkv", "fp8"), ("fused_qkv", "mxfp4")]
)
def test_the_config_says_how_the_checkpoint_is_stored(layout: str, store: str | None) -> None:
    quantised = {} if store is None else {"quantization_config": {"quant_method": "fp8", "store_dtype": store}}
    model = make(attention_projection_layout=layout, checkpoint_tp_size=1, **quantised)
    adapter = model.state_dict_adapter
    assert adapter._uses_fused_qkv_checkpoint == (layout == "fused_qkv")
    assert adapter.supports_write_through_checkpoint_load == (store is None)
    if store == "mxfp4":  # 16 columns of a down projection are no group of 32
        with pytest.raises(CheckpointError, match=r"down_proj\.weight: MXFP4 needs an input divisible by 32"):
            adapter.to_hf(model.state_dict(), quantization=True, for_checkpoint_load=True)
        with pytest.raises(CheckpointError, match=r"down_proj\.weight: MXFP4 needs columns in groups of 32"):
            adapter.to_hf(model.state_dict(), quantization=True)
        return
    converted = adapter.to_hf(model.state_dict(), quantization=store is not None)
    assert any("qkv_proj" in key for key in converted) == (layout == "fused_qkv")
    assert any(key.endswith("weight_scale_inv") for key in converted) == (store is not None)
    assert not any(key.endswith("weight_scale") for key in converted)
    # Without `quantization` it is the split layout, whatever the checkpoint is.
    assert adapter.to_hf(model.state_dict()).keys() == make().state_dict_adapter.to_hf(make().state_dict()).keys()


# Shapes of the released files, under the keys that each layout has of its own.
RELEASED: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    "flash": {
        "layers.0.self_attn.q_proj.weight": ((12288, 4096), "float8_e4m3fn"),
        "layers.0.self_attn.q_proj.weight_scale_inv": ((96, 32), "float32"),
        "layers.0.self_attn.k_proj.weight_scale_inv": ((8, 32), "float32"),
        "layers.0.self_attn.v_proj.weight_scale_inv": ((4, 32), "float32"),
        "layers.1.self_attn.k_proj.weight_scale_inv": ((12, 32), "float32"),
        "layers.1.self_attn.v_proj.weight_scale_inv": ((8, 32), "float32"),
    },
    "v2.5": {
        "layers.0.self_attn.qkv_proj.weight": ((13568, 4096), "float8_e4m3fn"),
        "layers.0.self_attn.qkv_proj.weight_scale_inv": ((108, 32), "float32"),
        "layers.1.self_attn.qkv_proj.weight": ((14848, 4096), "float8_e4m3fn"),
        "layers.1.self_attn.qkv_proj.weight_scale_inv": ((116, 32), "float32"),
        "layers.1.mlp.experts.255.down_proj.weight_scale_inv": ((32, 16), "float32"),
    },
    "v2.6-flash": {
        "layers.1.self_attn.qkv_proj.weight_scale_inv": ((116, 32), "float32"),
        "layers.1.mlp.experts.255.up_proj.weight": ((2048, 2048), "uint8"),
        "layers.1.mlp.experts.255.up_proj.weight_scale": ((2048, 128), "uint8"),
        "layers.1.mlp.experts.255.down_proj.weight": ((4096, 1024), "uint8"),
        "layers.1.mlp.experts.255.down_proj.weight_scale": ((4096, 64), "uint8"),
    },
    "v2.6-pro": {
        "layers.0.self_attn.qkv_proj.weight": ((27136, 6144), "float8_e4m3fn"),
        "layers.1.self_attn.qkv_proj.weight_scale_inv": ((216, 48), "float32"),
        "layers.0.mlp.down_proj.weight_scale_inv": ((48, 128), "float32"),
        "layers.1.mlp.experts.383.gate_proj.weight": ((2048, 3072), "uint8"),
        "layers.1.mlp.experts.383.gate_proj.weight_scale": ((2048, 192), "uint8"),
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_destinations_have_the_shapes_of_the_released_files(name: str) -> None:
    tp = 8 if name.endswith("pro") else 4
    settings: dict[str, Any] = {"num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1]}
    with torch.device("meta"):
        config = preset_config(name, **settings, checkpoint_tp_size=tp)
        model = MODEL_CLASSES[config.model_type].from_config(config)
    destinations = model.state_dict_adapter.to_hf(model.state_dict(), quantization=True, for_checkpoint_load=True)
    for key, (shape, dtype) in RELEASED[name].items():
        tensor = destinations[f"model.{key}"]
        assert (tuple(tensor.shape), str(tensor.dtype)) == (shape, f"torch.{dtype}"), key


# -- the package ------------------------------------------------------------------------------------------------------

NAMES = (
    "MiMoV2Config",
    "MiMoV2FlashConfig",
    "MiMoV2FlashForCausalLM",
    "MiMoV2FlashModel",
    "MiMoV2FlashStateDictAdapter",
    "MiMoV2ForCausalLM",
)


def test_the_package_is_lazy() -> None:
    code = f"""
import sys
import automimo.mimo_v2_flash as package
assert not {{"torch", "transformers"}} & set(sys.modules), "imported"
assert set({NAMES!r}) <= set(dir(package))
assert package.__all__ == {sorted(NAMES)!r}
for name in package.__all__:
    assert getattr(package, name).__name__ == name
assert package.MiMoV2FlashModel is __import__("automimo").MiMoV2FlashModel
try:
    package.MiMoV3
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert "MiMoV3" in done.stdout, done.stderr
