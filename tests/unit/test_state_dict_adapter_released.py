"""The state-dict adapter against every released form: loads, conversions of state dicts, exports."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from released_folders import built, config, values
from released_oracle import FLASH, FLASH_FORMS, FORMS, PRO, TP2, Shape, encode_fp8
from torch import Tensor

from automimo.errors import CheckpointError
from automimo.mimo_v2_flash import adapter_decode
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.model import MODEL_CLASSES, MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.state_dict_adapter import MiMoV2FlashStateDictAdapter
from automimo.mimo_v2_flash.storage import StoredMatrix
from automimo.mimo_v2_flash.storage.in_memory import StateDictReader, decode_in_memory

MTP = "model.mtp."
# The MTP blocks of one are enough: they are left out.
NAMES = {
    "flash": replace(FLASH, pattern=(0, 1), mtp_layers=0),
    "tp2": TP2,
    "pro": replace(PRO, pattern=(1, 0), mtp_layers=0),
}
# The adapter knows nothing of the reading in which v has scales of its own: that one is an option of folders.
CASES = [
    (name, form)
    for name in NAMES
    for form in FORMS
    if form != "fp8-flash-own" and not (name == "pro" and form in FLASH_FORMS)
]
Q0 = "model.layers.0.self_attn.qkv_proj.weight"
K0, V0 = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
EXPERT = "model.layers.1.mlp.experts.11.down_proj.weight"


def config_for(shape: Shape, form: str, **changes: Any) -> MiMoV2FlashConfig:
    """The config of a form, saying what a user has to say: the layout, and the number of shards of a fused one."""
    words = config(shape, form)
    if form in FLASH_FORMS or "split" in form:
        words["attention_projection_layout"] = "split"  # mimo_v2 means fused when it says nothing
    if form.endswith("-contiguous"):
        words["checkpoint_tp_size"] = 1
    elif form.endswith("-fused"):
        words["checkpoint_tp_size"] = shape.checkpoint_tp
    result = MODEL_CLASSES[words["model_type"]].config_class.from_dict({**words, **changes})
    assert isinstance(result, MiMoV2FlashConfig)
    return result


def model_for(shape: Shape, form: str, dtype: torch.dtype = torch.float32, **changes: Any) -> MiMoV2FlashForCausalLM:
    """A model of NaNs."""
    settings = config_for(shape, form, dtype=str(dtype).removeprefix("torch."), **changes)
    with torch.device("meta"):
        model = MODEL_CLASSES[settings.model_type].from_config(settings)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(torch.nan)
    return model


def text_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(MTP)}


def assert_holds(model: MiMoV2FlashForCausalLM, decoded: dict[str, Tensor]) -> None:
    """Every tensor of the model, by split key, is the decoded one in the model's dtype."""
    views = model.state_dict_adapter.to_hf(model.state_dict())
    assert views.keys() == text_of(decoded).keys()
    for key, view in views.items():
        assert torch.equal(view, decoded[key].to(view.dtype)), key


def fill(model: MiMoV2FlashForCausalLM, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for key, view in model.state_dict_adapter.to_hf(model.state_dict()).items():
            view.copy_(tensors[key])


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


# -- loads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *[(name, form) for name in NAMES for form in ("bf16-split", "fp8-fused", "mxfp4-fused")],
        ("flash", "fp8-contiguous"),
        ("flash", "fp8-flash"),
        ("tp2", "fp8-flash"),
        ("pro", "fp8-split-plain"),
    ],
)
def test_destinations_are_as_stored_and_filling_them_fills_the_model(name: str, form: str, dtype: torch.dtype) -> None:
    stored, decoded = built(NAMES[name], form)
    model = model_for(NAMES[name], form, dtype)
    adapter, state = model.state_dict_adapter, model.state_dict()
    assert adapter.supports_write_through_checkpoint_load == (form == "bf16-split")
    destinations = adapter.to_hf(state, quantization=form != "bf16-split", for_checkpoint_load=True)
    assert destinations.keys() == text_of(stored).keys()
    for key, destination in destinations.items():
        assert destination.shape == stored[key].shape, key
        if stored[key].dtype in (torch.uint8, torch.float8_e4m3fn) or key.endswith("_scale_inv"):
            assert destination.dtype == stored[key].dtype, key
        else:
            assert any(destination.data_ptr() == tensor.data_ptr() for tensor in state.values()) or "experts" in key
        destination.copy_(stored[key])
    loaded = adapter.from_hf(destinations)
    assert loaded.keys() == state.keys()
    for key, tensor in loaded.items():
        assert tensor.data_ptr() == state[key].data_ptr(), key
    assert_holds(model, decoded)


@pytest.mark.parametrize(("name", "form"), CASES)
@pytest.mark.parametrize("bare", [False, True])  # the innermost, so that a form is built once
def test_any_state_dict_becomes_ours(name: str, form: str, bare: bool) -> None:
    shape = NAMES[name]
    stored, decoded = built(shape, form)
    model = model_for(shape, form)
    adapter = MiMoV2FlashStateDictAdapter(model.config, model.model.moe_config, model.backend, dtype=torch.float32)
    given = {key.removeprefix("model.") if bare else key: tensor for key, tensor in stored.items()}
    before = dict(given)
    result = adapter.from_hf(given)
    assert given == before
    if bare:
        result = {name if name.startswith("lm_head") else f"model.{name}": t for name, t in result.items()}
    assert not any(".qkv_proj" in name or "_scale" in name for name in result)
    model.load_state_dict(result)
    assert_holds(model, decoded)
    if not bare:
        return
    # A load whose tensors came in memory of their own.
    loading = model_for(shape, form)
    adapter, state = loading.state_dict_adapter, loading.state_dict()
    adapter.to_hf(state, quantization=not form.startswith("bf16"), for_checkpoint_load=True)
    loaded = adapter.from_hf(stored)
    assert all(tensor.data_ptr() == state[key].data_ptr() for key, tensor in loaded.items())
    assert_holds(loading, decoded)


def test_shards_are_found_in_the_scales_of_a_state_dict_once() -> None:
    for shape in NAMES.values():
        stored, _ = built(shape, "fp8-fused")
        model = model_for(shape, "fp8-fused", checkpoint_tp_size=None)
        with pytest.raises(CheckpointError, match="set checkpoint_tp_size"):
            _ = model.state_dict_adapter.checkpoint_tp_size
        with pytest.raises(CheckpointError, match="set checkpoint_tp_size"):
            model.state_dict_adapter.to_hf(model.state_dict(), quantization=True, for_checkpoint_load=True)
        model.state_dict_adapter.from_hf(stored)
        assert model.state_dict_adapter.checkpoint_tp_size == shape.checkpoint_tp


def test_experts_are_decoded_straight_into_their_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, int] = {}

    def decode(reader: StateDictReader, matrix: StoredMatrix, out: Tensor) -> None:
        written[matrix.key] = out.untyped_storage().data_ptr()
        decode_in_memory(reader, matrix, out)

    monkeypatch.setattr(adapter_decode, "decode_in_memory", decode)
    for form in ("fp8-fused", "mxfp4-fused"):
        written.clear()
        result = model_for(TP2, form).state_dict_adapter.from_hf(built(TP2, form)[0])
        stacks = {t.untyped_storage().data_ptr() for name, t in result.items() if name.endswith("projs")}
        assert len(stacks) == 2 * 2
        experts = [storage for key, storage in written.items() if ".experts." in key]
        assert len(experts) == 2 * 3 * TP2.n_routed_experts
        assert set(experts) == stacks


def test_the_model_is_let_go_of_after_a_load_and_after_a_failed_one() -> None:
    stored, _ = built(TP2, "mxfp4-fused")
    model = model_for(TP2, "mxfp4-fused")
    adapter, state = model.state_dict_adapter, model.state_dict()
    for tensors in (stored, {key: tensor for key, tensor in stored.items() if key != EXPERT}):
        adapter.to_hf(state, quantization=True, for_checkpoint_load=True)
        if tensors is stored:
            adapter.from_hf(tensors)
        else:
            with pytest.raises(CheckpointError, match="missing weights"):
                adapter.from_hf(tensors)
        again = adapter.from_hf(stored)
        assert not {t.data_ptr() for t in again.values()} & {t.data_ptr() for t in state.values()}


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = MODEL_CLASSES["mimo_v2"].from_config(config_for(NAMES["pro"], "mxfp4-fused"))
    stored, _ = built(NAMES["pro"], "mxfp4-fused")
    adapter, state = model.state_dict_adapter, model.state_dict()
    for load in (True, False):
        converted = adapter.to_hf(state, quantization=True, for_checkpoint_load=load)
        assert {key: t.shape for key, t in converted.items()} == {key: t.shape for key, t in text_of(stored).items()}
        back = adapter.from_hf(converted)
        assert {name: t.shape for name, t in back.items()} == {name: t.shape for name, t in state.items()}


# -- exports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *[(name, form) for name in NAMES for form in ("fp8-fused", "mxfp4-fused", "fp8-contiguous")],
        *[("flash", "fp8-flash"), ("tp2", "fp8-flash"), ("pro", "fp8-split-plain")],
    ],
)
def test_an_export_has_the_bytes_of_the_source_layout(name: str, form: str) -> None:
    shape = NAMES[name]
    stored, decoded = built(shape, form)
    model = model_for(shape, form)
    packed = {key: value for key, value in decoded.items() if form.startswith("mxfp4") and ".experts." in key}
    fill(model, values(shape) | packed)
    state = model.state_dict()
    exported = model.state_dict_adapter.to_hf(state, quantization=True)
    assert exported.keys() == text_of(stored).keys()
    for key, tensor in exported.items():
        if stored[key].dtype in (torch.uint8, torch.float8_e4m3fn) or key.endswith("_scale_inv"):
            assert same_bytes(tensor, stored[key]), key
        else:
            assert tensor is state[key], key
    again = model_for(shape, form)
    again.load_state_dict(again.state_dict_adapter.from_hf(exported))
    assert_holds(again, {**decoded, **{key: values(shape)[key] for key in decoded if key.endswith("gate.weight")}})


def test_what_cannot_be_exported() -> None:
    model = model_for(TP2, "fp8-fused")
    fill(model, values(TP2))
    adapter, state = model.state_dict_adapter, dict(model.state_dict())
    state["model.layers.1.mlp.experts.down_projs"] = torch.full_like(
        state["model.layers.1.mlp.experts.down_projs"], torch.inf
    )
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.0\.down_proj\.weight: a matrix with infinite or NaN values"
    ):
        adapter.to_hf(state, quantization=True)
    state = dict(model.state_dict())
    del state[K0]
    for load in (False, True):
        with pytest.raises(KeyError, match="Incomplete native QKV projection group") as error:
            adapter.to_hf(state, quantization=True, for_checkpoint_load=load)
        assert "model.layers.0.self_attn has q_proj but not k_proj" in str(error.value)
        assert isinstance(error.value, CheckpointError)
    with pytest.raises(KeyError, match="Incomplete native QKV projection group"):
        adapter.convert_single_tensor_to_hf(V0, model.state_dict()[V0], quantization=True)
    assert adapter.to_hf(state).keys() == values(TP2).keys() - {k for k in values(TP2) if k.startswith(MTP)} - {K0}
    flash = model_for(NAMES["flash"], "fp8-flash")
    with pytest.raises(CheckpointError, match="has no q_proj, so its attention is incomplete"):
        flash.state_dict_adapter.convert_single_tensor_to_hf(K0, flash.state_dict()[K0], quantization=True)


def test_a_single_tensor_and_excluded_keys() -> None:
    model = model_for(TP2, "mxfp4-fused")
    _, decoded = built(TP2, "mxfp4-fused")
    fill(model, values(TP2) | {key: value for key, value in decoded.items() if ".experts." in key})
    adapter, state = model.state_dict_adapter, model.state_dict()
    stored, _ = built(TP2, "mxfp4-fused")
    name = "model.layers.1.mlp.experts.gate_and_up_projs"
    options: dict[str, Any] = {"quantization": True, "exclude_key_regex": r".*\.(3|10)\.gate_proj"}
    pairs = dict(adapter.convert_single_tensor_to_hf(name, state[name], **options))
    assert pairs.keys() == {
        f"model.layers.1.mlp.experts.{e}.{part}_proj.weight{suffix}"
        for e in range(12)
        for part in ("gate", "up")
        for suffix in ("", "_scale")
        if part == "up" or e not in (3, 10)
    }
    assert all(same_bytes(tensor, stored[key]) for key, tensor in pairs.items())
    down = "model.layers.0.mlp.down_proj.weight"
    codes, scale = encode_fp8(state[down])
    pairs = dict(adapter.convert_single_tensor_to_hf(down, state[down], quantization=True))
    assert same_bytes(pairs[down], codes)
    assert same_bytes(pairs[f"{down}_scale_inv"], scale)
    destinations = dict(
        adapter.convert_single_tensor_to_hf(down, state[down], quantization=True, for_checkpoint_load=True)
    )
    assert {key: t.shape for key, t in destinations.items()} == {key: t.shape for key, t in pairs.items()}
    [(key, tensor)] = adapter.convert_single_tensor_to_hf("lm_head.weight", state["lm_head.weight"], quantization=True)
    assert key == "lm_head.weight"
    assert tensor is state["lm_head.weight"]
    kept = adapter.to_hf(state, exclude_key_regex=r".*(self_attn\.[qkv]_proj|experts\.0\.)", quantization=True)
    everything = adapter.to_hf(state, quantization=True)
    assert everything.keys() - kept.keys() == {k for k in everything if "qkv" in k or ".experts.0." in k}


# -- the documented pieces --------------------------------------------------------------------------------------------


def test_scales_for_a_key_have_the_released_shape() -> None:
    adapter = MiMoV2FlashStateDictAdapter(MiMoV2FlashConfig(), None, model_for(TP2, "bf16-split").backend)

    def shape(key: str, *size: int) -> tuple[int, ...]:
        scale = adapter._create_scale_inv_for_hf_key(key, torch.empty(size, device="meta"))
        assert scale.dtype == torch.float32
        return tuple(scale.shape)

    # The released V2-Flash: 8 rows for the 768 rows of k on full layers, and ordinary grids elsewhere.
    assert shape("model.layers.0.self_attn.q_proj.weight", 12288, 4096) == (96, 32)
    assert shape(K0, 768, 4096) == shape(K0.removeprefix("model."), 768, 4096) == (8, 32)
    assert shape(V0, 512, 4096) == (4, 32)
    assert shape("model.layers.1.self_attn.k_proj.weight", 1536, 4096) == (12, 32)
    assert shape("model.layers.1.self_attn.v_proj.weight", 1024, 4096) == (8, 32)
    assert shape("model.layers.1.mlp.experts.7.down_proj.weight", 4096, 2048) == (32, 16)
    assert shape("model.layers.0.mlp.up_proj.weight", 200, 130) == (2, 2)
    ones = adapter._create_scale_inv_for_hf_key("model.layers.0.mlp.up_proj.weight", torch.empty(200, 130))
    assert torch.equal(ones, torch.ones(2, 2))


def test_destinations_of_fused_projections() -> None:
    model = model_for(NAMES["flash"], "fp8-fused")
    adapter, state = model.state_dict_adapter, model.state_dict()
    stored, decoded = built(NAMES["flash"], "fp8-fused")
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.self_attn"
        natives = [state[f"{prefix}.{part}_proj.weight"] for part in "qkv"]
        destinations = adapter._make_fused_qkv_load_destinations(prefix, layer, *natives)
        assert list(destinations) == [f"{prefix}.qkv_proj.weight", f"{prefix}.qkv_proj.weight_scale_inv"]
        for key, tensor in destinations.items():
            assert (tensor.dtype, tensor.shape) == (stored[key].dtype, stored[key].shape)
            tensor.copy_(stored[key])
        result = adapter._convert_fused_qkv(destinations)
        assert result is destinations
        for part, native in zip("qkv", natives, strict=True):
            assert result[f"{prefix}.{part}_proj.weight"] is native
            assert torch.equal(native, decoded[f"{prefix}.{part}_proj.weight"])
        # Its part of the load is over: the next ones are new tensors.
        again = adapter._convert_fused_qkv({key: stored[key] for key in stored if key.startswith(f"{prefix}.qkv")})
        assert again[f"{prefix}.q_proj.weight"].data_ptr() != natives[0].data_ptr()
    q, k, v = (state[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    with pytest.raises(
        CheckpointError, match=r"k_proj.weight: has shape \[512, 160\], config.json asks for \[768, 160"
    ):
        adapter._make_fused_qkv_load_destinations("model.layers.0.self_attn", 0, q, v, v)
    with pytest.raises(CheckpointError, match="several devices: "):
        adapter._make_fused_qkv_load_destinations("model.layers.0.self_attn", 0, q, k.to("meta"), v)


def test_destinations_of_mxfp4_matrices() -> None:
    adapter = model_for(TP2, "mxfp4-fused").state_dict_adapter
    pairs = adapter._make_mxfp4_load_destinations(EXPERT, torch.empty(160, 96))
    assert [(key, t.dtype, tuple(t.shape)) for key, t in pairs] == [
        (EXPERT, torch.uint8, (160, 48)),
        (f"{EXPERT}_scale", torch.uint8, (160, 3)),
    ]
    with pytest.raises(CheckpointError, match=r"needs a matrix, got shape \[2, 3, 32\]"):
        adapter._make_mxfp4_load_destinations(EXPERT, torch.empty(2, 3, 32))
    with pytest.raises(CheckpointError, match="divisible by 32, it has 48 columns"):
        adapter._make_mxfp4_load_destinations(EXPERT, torch.empty(160, 48))


def test_the_steps_change_the_dictionary_they_are_given() -> None:
    stored, decoded = built(TP2, "mxfp4-fused")
    adapter = model_for(TP2, "mxfp4-fused").state_dict_adapter
    pair = {key: stored[key] for key in (EXPERT, f"{EXPERT}_scale")}
    assert adapter._dequantize_mxfp4_experts(pair) is pair
    assert list(pair) == [EXPERT]
    assert torch.equal(pair[EXPERT], decoded[EXPERT])
    down = "model.layers.0.mlp.down_proj.weight"
    pair = {key: stored[key] for key in (down, f"{down}_scale_inv")}
    assert adapter._dequantize(pair) is pair
    assert list(pair) == [down]
    assert torch.equal(pair[down], decoded[down])
    for step in (adapter._convert_fused_qkv, adapter._dequantize_mxfp4_experts, adapter._dequantize):
        assert step({}) == {}
    tensor = torch.zeros(2, 3)
    assert adapter._local_tensor(tensor) is tensor
    adapter._copy_converted_to_native(tensor, tensor, torch.ones(2, 3, dtype=torch.bfloat16))
    assert torch.equal(tensor, torch.ones(2, 3))


def test_the_sink_of_transformer_engine() -> None:
    model = model_for(TP2, "fp8-fused")
    assert model.state_dict_adapter.hf_to_internal_map == {}
    model.backend.attn = "te"  # what it is called there; the backend itself is not needed for names
    adapter = MiMoV2FlashStateDictAdapter(model.config, model.model.moe_config, model.backend, dtype=torch.float32)
    hf, ours = "self_attn.attention_sink_bias", "self_attn.attn_module.softmax_offset"
    assert (adapter.hf_to_internal_map, adapter.internal_to_hf_map) == ({hf: ours}, {ours: hf})
    assert adapter._model_to_hf_key(f"model.layers.1.{ours}") == f"model.layers.1.{hf}"
    assert adapter._model_to_hf_key(f"model.layers.1.x{ours}") == f"model.layers.1.x{ours}"
    values_ = {f"a.{hf}": torch.ones(2).bfloat16(), hf: torch.ones(1), f"a.{hf}.b": torch.ones(3).bfloat16()}
    mapped = MiMoV2FlashStateDictAdapter._apply_key_mapping(values_, adapter.hf_to_internal_map)
    assert mapped is values_
    assert {key: t.dtype for key, t in mapped.items()} == {
        f"a.{ours}": torch.float32, ours: torch.float32, f"a.{hf}.b": torch.bfloat16
    }  # fmt: skip
    stored, decoded = built(TP2, "fp8-fused")
    state = {key.replace(hf, ours): tensor for key, tensor in model.state_dict().items()}
    destinations = adapter.to_hf(state, quantization=True, for_checkpoint_load=True)
    assert destinations.keys() == text_of(stored).keys()
    loaded = adapter.from_hf(stored)
    assert loaded.keys() == state.keys()
    sink = f"model.layers.1.{ours}"
    assert loaded[sink].data_ptr() == state[sink].data_ptr()
    assert torch.equal(state[sink], decoded[f"model.layers.1.{hf}"])
    fresh = adapter.from_hf(stored)
    assert fresh[sink].dtype == torch.float32
    assert adapter.to_hf(state).keys() == text_of(decoded).keys()
