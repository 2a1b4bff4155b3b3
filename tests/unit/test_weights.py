"""Folders of the model: written and read back, carried parts, dtypes, everything that must be refused.

Files are made and checked with the safetensors library, not with our own reader and writer.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_text import VOCAB, relative, tiny_config, tiny_model
from torch import Tensor, nn
from transformers.models.mimo_v2_flash import MiMoV2FlashForCausalLM as NativeModel

from automimo.checkpoint import CheckpointReader
from automimo.errors import CheckpointError, ConfigError
from automimo.mimo_v2_flash.config import MiMoV2Config
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, MiMoV2ForCausalLM
from automimo.mimo_v2_flash.weights import checkpoint_places, is_carried, load_weights, parameter_of

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
        assert parameter_of(key) == place.parameter
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


def carried_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise(dtype: torch.dtype, *shape: int) -> Tensor:
        size = torch.empty(shape, dtype=dtype).nbytes
        codes = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        return codes.view(dtype).view(shape)  # any bits, NaNs too

    return {
        "model.mtp.layers.0.eh_proj.weight": noise(torch.bfloat16, 6, 12),
        "model.mtp.layers.0.self_attn.qkv_proj.weight": noise(torch.float8_e4m3fn, 10, 7),
        "model.mtp.layers.0.self_attn.qkv_proj.weight_scale_inv": noise(torch.float32, 1, 1),
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


# -- keys that do not fit ---------------------------------------------------------------------------------------------


def drop(*names: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


KEY_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], list[str]]] = {
    "missing head": (drop("lm_head.weight"), ["1 missing", "lm_head.weight"]),
    "missing expert": (
        drop("model.layers.2.mlp.experts.5.up_proj.weight"),
        ["1 missing", "model.layers.2.mlp.experts.5.up_proj.weight"],
    ),
    "missing bias": (
        drop("model.layers.3.mlp.gate.e_score_correction_bias"),
        ["model.layers.3.mlp.gate.e_score_correction_bias"],
    ),
    "missing sink": (drop(f"model.layers.1.self_attn.{SINK}"), [f"model.layers.1.self_attn.{SINK}"]),
    "unexpected": (put("model.layers.1.self_attn.q_norm.weight", torch.ones(2)), ["1 unexpected", "q_norm"]),
    "one expert too many": (
        put("model.layers.1.mlp.experts.6.up_proj.weight", torch.ones(16, 32)),
        ["1 unexpected", "experts.6.up_proj"],
    ),
    "one layer too many": (put("model.layers.4.input_layernorm.weight", torch.ones(32)), ["1 unexpected", "layers.4"]),
    "wrong shape": (
        put("model.layers.0.self_attn.k_proj.weight", torch.zeros(24, 32)),
        ["1 of the wrong shape", "found [24, 32], expected [12, 32]"],
    ),
    "transposed expert": (
        put("model.layers.1.mlp.experts.0.gate_proj.weight", torch.zeros(32, 16)),
        ["found [32, 16], expected [16, 32]"],
    ),
    "a prefix like a carried one": (put("model.mtpx.weight", torch.ones(1)), ["1 unexpected", "model.mtpx.weight"]),
    "fused": (
        lambda tensors: [put("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(68, 32))(tensors)],
        ["model.layers.0.self_attn.qkv_proj.weight", "fused", "split layout"],
    ),
    "FP8": (
        put("model.layers.0.mlp.up_proj.weight", torch.zeros(48, 32).to(torch.float8_e4m3fn)),
        ["model.layers.0.mlp.up_proj.weight", "F8_E4M3", "BF16"],
    ),
    "MXFP4": (
        put("model.layers.1.mlp.experts.0.up_proj.weight", torch.zeros(16, 16, dtype=torch.uint8)),
        ["model.layers.1.mlp.experts.0.up_proj.weight", "U8"],
    ),
    "everything at once": (
        lambda tensors: [
            drop("model.norm.weight")(tensors),
            put("stray", torch.ones(1))(tensors),
            put("lm_head.weight", torch.ones(1))(tensors),
        ],
        ["1 missing", "model.norm.weight", "1 unexpected", "stray", "1 of the wrong shape", "lm_head.weight"],
    ),
}


@pytest.mark.parametrize("name", KEY_FAULTS)
def test_keys_that_do_not_fit_are_named(name: str, tmp_path: Path) -> None:
    change, words = KEY_FAULTS[name]
    folder = rewrite(saved(tmp_path / "out"), change)
    with pytest.raises(CheckpointError) as error:
        MiMoV2FlashForCausalLM.from_pretrained(str(folder))
    for word in (str(folder), *words):
        assert word in str(error.value)


def test_the_keys_are_checked_before_anything_is_filled(tmp_path: Path) -> None:
    folder = rewrite(saved(tmp_path / "out"), drop("lm_head.weight"))
    model = tiny_model(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with CheckpointReader(folder) as reader, pytest.raises(CheckpointError):
        load_weights(model, reader)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_doubled_key_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out", max_shard_bytes=20000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    other = next(name for name in index["weight_map"].values() if name != index["weight_map"]["lm_head.weight"])
    tensors = load_file(folder / other)
    save_file({**tensors, "lm_head.weight": torch.zeros(VOCAB, 32)}, folder / other, {"format": "pt"})
    with pytest.raises(CheckpointError, match="stored twice") as error:
        MiMoV2FlashForCausalLM.from_pretrained(str(folder))
    assert "lm_head.weight" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", 5, ["missing", "layers.4"]),
        ("n_routed_experts", 7, ["missing", "experts.6"]),
        ("vocab_size", 62, ["wrong shape", "expected [62, 32]"]),
        ("add_full_attention_sink_bias", False, ["unexpected", SINK]),
        ("attention_bias", True, ["missing", "q_proj.bias"]),
    ],
)
def test_a_config_that_does_not_fit_its_weights(key: str, value: Any, words: list[str], tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    values = json.loads((folder / "config.json").read_text())
    for derived in ("layer_types", "mlp_layer_types", "hybrid_layer_pattern", "moe_layer_freq"):
        if key == "num_hidden_layers":
            values[derived] = [*values[derived], values[derived][-1]]
    (folder / "config.json").write_text(json.dumps({**values, key: value}))
    with pytest.raises(CheckpointError) as error:
        MiMoV2FlashForCausalLM.from_pretrained(str(folder))
    for word in words:
        assert word in str(error.value)


# -- from_pretrained: arguments and places ----------------------------------------------------------------------------


def test_load_weights_false_gives_the_bare_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    (folder / "model.safetensors").unlink()
    with torch.device("meta"):
        model = MiMoV2FlashForCausalLM.from_pretrained(str(folder), load_weights=False, dtype="bfloat16")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.lm_head.weight.dtype == torch.bfloat16
    # It has no weights of the folder, so it carries nothing from there.
    bare = MiMoV2FlashForCausalLM.from_pretrained(str(folder), load_weights=False)
    bare.initialize_weights(dtype=torch.float32)
    bare.save_pretrained(tmp_path / "new")
    assert_same_state(MiMoV2FlashForCausalLM.from_pretrained(str(tmp_path / "new")), bare)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        MiMoV2FlashForCausalLM.from_pretrained(str(folder))


@pytest.mark.parametrize("given", ["bfloat16", torch.bfloat16, "torch.bfloat16"])
def test_the_dtype_argument(given: Any, tmp_path: Path) -> None:
    model = MiMoV2FlashForCausalLM.from_pretrained(str(saved(tmp_path / "out")), dtype=given)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float32 if name.endswith((*ROUTER, SINK)) else torch.bfloat16), name
    assert MiMoV2FlashForCausalLM.from_pretrained(str(tmp_path / "out"), dtype="auto").config.dtype == torch.float32
    with pytest.raises(ConfigError, match="'bf16x'"):
        MiMoV2FlashForCausalLM.from_pretrained(str(tmp_path / "out"), dtype="bf16x")


def test_other_arguments(tmp_path: Path) -> None:
    folder = str(saved(tmp_path / "out"))
    config = MiMoV2FlashForCausalLM.config_class.from_pretrained(folder)
    model = MiMoV2FlashForCausalLM.from_pretrained(folder, config=config, sliding_window=2, dtype=torch.bfloat16)
    assert model.model.layers["1"].self_attn.window == 2
    # The caller's config is not touched.
    assert (config.sliding_window, config.dtype) == (5, torch.float32)
    model.save_pretrained(tmp_path / "narrow")
    assert MiMoV2FlashForCausalLM.from_pretrained(str(tmp_path / "narrow")).config.sliding_window == 2
    with pytest.raises(ConfigError, match="sliding_window.*0"):
        MiMoV2FlashForCausalLM.from_pretrained(folder, sliding_window=0)
    with pytest.raises(TypeError, match="one positional argument"):
        MiMoV2FlashForCausalLM.from_pretrained(folder, "extra")
    with pytest.raises(TypeError, match="'surprise'"):
        MiMoV2FlashForCausalLM.from_pretrained(folder, surprise=1)
    aux = MiMoV2FlashForCausalLM.from_pretrained(folder, moe_overrides={"aux_loss_coeff": 0.5})
    assert aux.model.moe_config is not None
    assert aux.model.moe_config.aux_loss_coeff == 0.5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no config.json"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[1]", "holds a list"),
    ],
)
def test_a_folder_without_a_readable_config(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as error:
        MiMoV2FlashForCausalLM.from_pretrained(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_the_other_class_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'mimo_v2_flash', this class reads 'mimo_v2'"):
        MiMoV2ForCausalLM.from_pretrained(str(saved(tmp_path / "out")))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/folder", "no such folder"),
        ("just-a-name", "no such folder"),
        ("a/b/c", "no such folder"),
        ("owner/model", "Hub could not supply"),
        ("owner--x/model", "Hub could not supply"),
    ],
)
def test_places_that_do_not_exist(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=words) as error:
        MiMoV2FlashForCausalLM.from_pretrained(name, revision="main")
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_hub_id_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of the Hub's cache: snapshots hold links to blobs."""
    model = tiny_model()
    cache = tmp_path / "models--owner--tiny"
    saved(cache / "snapshots" / "0123abc", model)
    for path in sorted((cache / "snapshots" / "0123abc").iterdir()):
        blob = cache / "blobs" / path.name
        blob.parent.mkdir(exist_ok=True)
        path.rename(blob)
        path.symlink_to(Path("../../blobs") / path.name)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for revision in (None, "main", "0123abc"):
        assert_same_state(MiMoV2FlashForCausalLM.from_pretrained("owner/tiny", revision=revision), model)
    with pytest.raises(CheckpointError, match="Hub could not supply"):
        MiMoV2FlashForCausalLM.from_pretrained("owner/tiny", revision="other")


# -- saving that must fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float16, 70000.0), (torch.float16, -1e9), (torch.bfloat16, 3.4e38)], ids=str
)
@pytest.mark.parametrize("name", ["model.layers.2.mlp.experts.down_projs", "model.norm.weight"])
def test_an_overflow_on_export_is_named_and_leaves_nothing(
    name: str, dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    with pytest.raises(CheckpointError, match="overflows") as error:
        model.save_pretrained(tmp_path / "out", dtype=dtype)
    key = name.replace("experts.down_projs", "experts.0.down_proj.weight")
    for word in (key, str(dtype), "float32"):
        assert word in str(error.value)
    assert list(tmp_path.iterdir()) == []
    model.save_pretrained(tmp_path / "out", dtype=torch.float32)


def test_existing_folders_are_refused_unless_replaced(tmp_path: Path) -> None:
    first, second = tiny_model(seed=1), tiny_model(seed=2)
    first.save_pretrained(tmp_path / "out")
    with pytest.raises(CheckpointError) as error:
        second.save_pretrained(tmp_path / "out")
    assert str(tmp_path / "out") in str(error.value)
    assert_same_state(MiMoV2FlashForCausalLM.from_pretrained(str(tmp_path / "out")), first)
    second.save_pretrained(tmp_path / "out", replace=True)
    assert_same_state(MiMoV2FlashForCausalLM.from_pretrained(str(tmp_path / "out")), second)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError):
        second.save_pretrained(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    second.save_pretrained(tmp_path / "empty")


def test_a_model_may_replace_the_folder_it_came_from(tmp_path: Path) -> None:
    model = MiMoV2FlashForCausalLM.from_pretrained(str(full_source(tmp_path / "out")), dtype=torch.float32)
    model.save_pretrained(tmp_path / "out", replace=True, dtype=torch.float32)
    found = tensors_of(tmp_path / "out")
    for key, tensor in carried_tensors().items():
        assert raw(found[key]) == raw(tensor), key
    assert (tmp_path / "out" / "dflash" / "config.json").read_bytes() == SIDE_FILES["dflash/config.json"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
