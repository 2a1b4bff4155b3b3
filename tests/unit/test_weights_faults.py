"""Folders that do not fit, arguments of from_pretrained, and exports that must fail without a trace."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
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
from tiny_text import VOCAB, tiny_model
from torch import Tensor

from automimo.checkpoint import CheckpointReader
from automimo.errors import CheckpointError, ConfigError
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, MiMoV2ForCausalLM
from automimo.mimo_v2_flash.storage import StoredCheckpoint
from automimo.mimo_v2_flash.weights import load_weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"


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
        ["model.layers.0.self_attn.qkv_proj.weight", "fused", "--source-tp", "--source-layout contiguous"],
    ),
    "FP8": (
        put("model.layers.0.mlp.up_proj.weight", torch.zeros(48, 32).to(torch.float8_e4m3fn)),
        ["model.layers.0.mlp.up_proj.weight", "F8_E4M3 without its scale"],
    ),
    "MXFP4": (
        put("model.layers.1.mlp.experts.0.up_proj.weight", torch.zeros(16, 16, dtype=torch.uint8)),
        ["model.layers.1.mlp.experts.0.up_proj.weight", "U8 without its scale"],
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
        load_weights(model, StoredCheckpoint(reader, model.config))
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
    with pytest.raises(ConfigError, match=r"sliding_window.*got 0"):
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
    saved(cache / "snapshots" / COMMIT, model)
    for path in sorted((cache / "snapshots" / COMMIT).iterdir()):
        blob = cache / "blobs" / path.name
        blob.parent.mkdir(exist_ok=True)
        path.rename(blob)
        path.symlink_to(Path("../../blobs") / path.name)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for revision in (None, "main", COMMIT):
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
