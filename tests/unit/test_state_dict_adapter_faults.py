"""State dicts that the state-dict adapter has to refuse, each for its reason."""

from collections.abc import Callable

import pytest
import torch
from released_folders import built
from released_oracle import TP2
from test_state_dict_adapter_released import EXPERT, K0, Q0, V0, model_for, text_of
from torch import Tensor

from automimo.errors import CheckpointError

Change = Callable[[dict[str, Tensor]], object]


def without(key: str) -> Change:
    return lambda tensors: tensors.pop(key)


def replaced(key: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({key: change(tensors[key].clone())})


def with_value(key: str, value: float | int) -> Change:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype)[0, 0] = value
        return tensor

    return replaced(key, change)


FAULTS: list[tuple[str, Change, list[str]]] = [
    ("mxfp4-fused", without(EXPERT), ["expert scales are missing weights", f"{EXPERT}_scale"]),
    ("mxfp4-fused", without(f"{EXPERT}_scale"), ["expert weights (U8) are missing scales", EXPERT]),
    ("mxfp4-fused", replaced(f"{EXPERT}_scale", lambda t: t[:, :-1]), [EXPERT, "MXFP4 needs U8", "[160, 5]"]),
    ("mxfp4-fused", replaced(EXPERT, lambda t: t.bfloat16()), [EXPERT, "has a scale", "BF16"]),
    ("mxfp4-fused", with_value(f"{EXPERT}_scale", 255), [EXPERT, "NaN"]),
    ("fp8-fused", without(f"{EXPERT}_scale_inv"), [EXPERT, "F8_E4M3 without its scale"]),
    ("fp8-fused", without(EXPERT), [f"{EXPERT}_scale_inv", "scale without its weight"]),
    ("fp8-fused", replaced(f"{EXPERT}_scale_inv", lambda t: t.double()), [EXPERT, "F64", "F32"]),
    ("fp8-fused", replaced(f"{EXPERT}_scale_inv", lambda t: t[:-1]), [EXPERT, "no grid"]),
    ("fp8-fused", with_value(f"{EXPERT}_scale_inv", torch.nan), [f"{EXPERT}_scale_inv", "finite"]),
    ("fp8-fused", with_value(EXPERT, 0x7F), [EXPERT, "NaN"]),
    ("fp8-fused", without(f"{Q0}_scale_inv"), [f"{Q0}: is stored as F8_E4M3 without its scale"]),
    ("fp8-fused", without(Q0), ["scales of fused projections are missing weights", f"{Q0}_scale_inv"]),
    ("fp8-fused", replaced(Q0, lambda t: t[:-1]), [Q0, "[2175, 160]", "[2176, 160]", "checkpoint_tp_size 2"]),
    ("fp8-fused", replaced(f"{Q0}_scale_inv", lambda t: t[:-1]), ["17 scale rows", "checkpoint_tp_size 2"]),
    ("fp8-fused", replaced(f"{Q0}_scale_inv", lambda t: t.bfloat16()), [f"{Q0}_scale_inv: is BF16", "F32"]),
    ("fp8-fused", replaced(Q0, lambda t: t.bfloat16()), [f"{Q0}: is stored as BF16 with a scale"]),
    ("fp8-fused", lambda t: t.update({K0: torch.zeros(384, 160)}), [K0, "is there twice"]),
    ("bf16-fused", replaced(Q0, lambda t: t.to(torch.int8)), [f"{Q0}: is stored as I8"]),
    ("bf16-split", replaced(K0, lambda t: t.to(torch.int32)), [f"{K0} is stored as I32"]),
    ("fp8-flash", without("model.layers.1.self_attn.k_proj.weight"), ["layers.1.self_attn.k_proj.weight_scale_inv"]),
    ("fp8-flash", without(f"{K0}_scale_inv"), [K0, "without its scale"]),
    # 256 rows of v have 2 rows of scales in both readings, but in this one the first 64 of each head use k's.
    ("fp8-flash", lambda t: [t.pop(K0), t.pop(f"{K0}_scale_inv")], [V0, K0, "share"]),
]


@pytest.mark.parametrize(("form", "change", "words"), FAULTS, ids=[str(i) for i in range(len(FAULTS))])
def test_state_dicts_that_contradict_themselves(form: str, change: Change, words: list[str]) -> None:
    stored = text_of(built(TP2, form)[0])
    change(stored)
    model = model_for(TP2, form)
    with pytest.raises(CheckpointError) as error:
        model.state_dict_adapter.from_hf(stored)
    for word in words:
        assert word in str(error.value)


def test_shards_found_out_before_are_held_against_the_scales() -> None:
    stored = text_of(built(TP2, "fp8-fused")[0])
    adapter = model_for(TP2, "fp8-fused").state_dict_adapter
    assert adapter.checkpoint_tp_size == 2
    stored[f"{Q0}_scale_inv"] = stored[f"{Q0}_scale_inv"][:-1]
    with pytest.raises(CheckpointError) as error:
        adapter.from_hf(stored)
    for word in (f"{Q0}_scale_inv: is F32 [17, 2]", "F32 [18, 2]", "checkpoint_tp_size 2"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("form", "key", "words"),
    [
        ("fp8-fused", "model.norm.weight", "1 missing:\n    model.norm.weight"),
        ("fp8-fused", "model.layers.0.self_attn.qkv_proj.", "model.layers.0.self_attn.q_proj.weight"),
        ("fp8-fused", "model.layers.0.mlp.up_proj.", "model.layers.0.mlp.up_proj.weight"),
        ("mxfp4-fused", "model.layers.1.mlp.experts.", "36 missing"),
        ("bf16-split", "model.layers.1.mlp.experts.", "36 missing"),
        (
            "mxfp4-fused",
            "model.layers.1.mlp.experts.10.down",
            "1 missing:\n    model.layers.1.mlp.experts.10.down_proj",
        ),
    ],
)
def test_a_load_that_leaves_something_out(form: str, key: str, words: str) -> None:
    model = model_for(TP2, form)
    destinations = model.state_dict_adapter.to_hf(
        model.state_dict(), quantization=form != "bf16-split", for_checkpoint_load=True
    )
    stored = {name: tensor for name, tensor in built(TP2, form)[0].items() if not name.startswith(key)}
    assert destinations.keys() - stored.keys()
    with pytest.raises(CheckpointError) as error:
        model.state_dict_adapter.from_hf(stored)
    assert words in str(error.value)


def test_a_load_refuses_other_shapes() -> None:
    model = model_for(TP2, "bf16-split")
    adapter = model.state_dict_adapter
    for key in ("model.norm.weight", K0):
        destinations = adapter.to_hf(model.state_dict(), for_checkpoint_load=True)
        destinations[key] = destinations[key][:1]
        with pytest.raises(CheckpointError, match=f"{key}: found "):
            adapter.from_hf(destinations)
