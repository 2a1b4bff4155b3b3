"""The `te` backend against a stand-in with the documented signature of Transformer Engine; it is not yet run on a GPU.

What counts is that a model with `te` computes what it computes with `sdpa`, in values and gradients, and that its sinks
are stored, loaded and kept in fp32 as those of any other backend.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import te_stand_in
import torch
import torch.distributed as dist
from te_stand_in import BOUNDS, NEW_CUDNN, packed, pair, run
from tiny_folders import saved, tensors_of
from tiny_text import assert_same_gradients, relative, tiny_config
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from automimo.attention import DenseLayout, KVCache, attend, build_layout
from automimo.attention.te import TeAttention, check_sink_cudnn
from automimo.backend import BackendConfig
from automimo.errors import ConfigError, TrainingError
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM

OLD_CUDNN = 91801
Made = list[te_stand_in.DotProductAttention]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Cores in the order in which they are made."""
    return te_stand_in.install(monkeypatch)


@pytest.fixture
def group_of_eight() -> Iterator[dist.ProcessGroup]:
    """Rank 3 of eight that never talk."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield dist.group.WORLD
    dist.destroy_process_group()


# -- a whole model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_full_attention_sink_bias": False},
        {"add_swa_attention_sink_bias": False, "add_full_attention_sink_bias": False},
        {"v_head_dim": 12, "swa_v_head_dim": 12},
        {"sliding_window": 1},
        {"sliding_window": 64},
        {"num_key_value_heads": 4, "swa_num_key_value_heads": 1},
        {"attention_value_scale": None, "swa_head_dim": 16},
    ],
    ids=str,
)
def test_a_packed_model_computes_what_sdpa_computes(made: Made, changes: dict[str, Any]) -> None:
    reference, ours = pair(**changes)
    logits, grads = run(ours, **packed(BOUNDS))
    expected, expected_grads = run(reference, **packed(BOUNDS))
    assert relative(logits, expected) < 1e-5
    assert_same_gradients(grads, expected_grads)
    assert [len(core.calls) for core in made] == [1] * 4


def test_a_padded_batch_becomes_a_packed_stream(made: Made) -> None:
    reference, ours = pair()
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, 13:], mask[1, :4] = 0, 0  # padding on either side
    inputs = {"input_ids": torch.arange(40).view(2, 20), "attention_mask": mask}
    logits, grads = run(ours, **inputs)
    expected, expected_grads = run(reference, **inputs)
    assert relative(logits[mask.bool()], expected[mask.bool()]) < 1e-5
    assert_same_gradients(grads, expected_grads)
    assert made[0].calls[0]["cu_seqlens_q"].tolist() == [0, 13, 29]


@pytest.mark.parametrize("recomputed", ["full", "selective"])
def test_activation_checkpointing_changes_nothing(made: Made, recomputed: str) -> None:
    _, ours = pair()
    expected, expected_grads = run(ours, **packed(BOUNDS))
    ours.zero_grad()
    ours.model.set_activation_checkpointing(recomputed)
    logits, grads = run(ours, **packed(BOUNDS))
    assert torch.equal(logits, expected)
    assert_same_gradients(grads, expected_grads)
    assert [len(core.calls) for core in made] == [3] * 4  # once before, then twice


def test_it_asks_for_what_transformer_engine_documents(made: Made) -> None:
    _, ours = pair(add_full_attention_sink_bias=False)
    ours(**packed(BOUNDS))
    full, sliding = made[0], made[1]
    assert (full.window, sliding.window) == ((-1, 0), (4, 0))  # ours counts the query, theirs the keys before it
    assert (full.softmax_type, sliding.softmax_type) == ("vanilla", "learnable")
    assert (full.heads, full.groups, sliding.groups) == (4, 1, 2)
    assert full.scale == 12**-0.5  # of the queries, not of a padded width
    call = full.calls[0]
    assert call["max_seqlen_q"] == call["max_seqlen_kv"] == 25
    assert call["cu_seqlens_q"].dtype == torch.int32
    assert call["cu_seqlens_q"].tolist() == BOUNDS
    assert call["value_layer"].shape == (40, 1, 12)
    assert not call["value_layer"][..., 8:].any()


def test_evaluation_and_training_reach_the_core(made: Made) -> None:
    _, ours = pair()
    for training in (True, False, True):
        ours.train(training)(**packed(BOUNDS))
        assert {core.training for core in made} == {training}


def test_generation_runs_on_sdpa(made: Made) -> None:
    reference, ours = (model.eval() for model in pair())
    ids = torch.arange(18).view(2, 9)
    with torch.no_grad():
        results = []
        for model in (reference, ours):
            cache = KVCache(4)
            prompt = model(ids[:, :7], cache=cache).logits
            results.append([prompt, *(model(ids[:, i : i + 1], cache=cache).logits for i in (7, 8))])
    for expected, logits in zip(*results, strict=True):
        assert relative(logits, expected) < 1e-5
    assert made == []


# -- one layer -------------------------------------------------------------------------------------------------------


def layer(**changes: Any) -> TeAttention:
    numbers: dict[str, Any] = {
        **{"heads": 4, "kv_heads": 2, "width": 12, "value_width": 8, "window": 5, "scale": 0.3, "sink": True},
        **changes,
    }
    made = TeAttention(**numbers)
    if made.softmax_offset is not None:
        made.softmax_offset.normal_()
    return made


def qkv(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, 4, 12), (tokens, 2, 12), (tokens, 2, 8))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def test_the_dtype_of_queries_and_values_is_kept(made: Made) -> None:
    te = layer()
    layout = build_layout(BOUNDS, window=5)
    out = te(*qkv(40, torch.bfloat16), layout)
    assert out.dtype == torch.bfloat16
    assert made[0].calls[0]["value_layer"].dtype == torch.bfloat16
    expected = attend(
        *qkv(40, torch.bfloat16), layout=layout, window=5, sink=te.softmax_offset, scale=0.3, backend="sdpa"
    )
    assert relative(out, expected) < 1e-2


def test_the_sink_is_the_buffer_and_may_move(made: Made) -> None:
    te = layer()
    layout = build_layout(BOUNDS, window=5)
    te(*qkv(40), layout)
    te.softmax_offset = te.softmax_offset + 1  # another tensor, as after a move to a device
    out = te(*qkv(40), layout)
    expected = attend(*qkv(40), layout=layout, window=5, sink=te.softmax_offset, scale=0.3, backend="eager")
    assert relative(out, expected) < 1e-6
    assert len(made) == 1
    assert list(made[0].parameters()) == []


def test_explicit_masks_are_refused(made: Made) -> None:
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    with pytest.raises(ConfigError, match=r"explicit masks.* use attention 'eager'"):
        layer()(*qkv(40), DenseLayout(1, 40, mask, mask))
    _, ours = pair()
    with pytest.raises(ConfigError, match="use attention 'eager'"):
        ours(torch.arange(40).unsqueeze(0), attention_mask=mask)
    assert made == []


def test_values_wider_than_queries_are_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim is 12 and v_head_dim 16"):
        layer(value_width=16)


def test_tensors_that_do_not_fit_are_refused(made: Made) -> None:
    with pytest.raises(ConfigError, match="do not have the 40 tokens"):
        layer()(*qkv(39), build_layout(BOUNDS, window=5))
    assert made == []


# -- what is installed -----------------------------------------------------------------------------------------------


def test_a_model_is_built_where_transformer_engine_cannot_be_imported(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)  # found, but fails to import
    _, ours = pair()
    with pytest.raises(ConfigError, match=r"transformer_engine\.pytorch cannot be imported"):
        ours(**packed(BOUNDS))
    assert made == []


def test_an_old_transformer_engine_is_reported(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(te_stand_in.DotProductAttention):
        def __init__(self, num_attention_heads: int, kv_channels: int, **options: Any) -> None:
            if "softmax_type" in options:
                raise TypeError("unexpected keyword argument 'softmax_type'")
            super().__init__(num_attention_heads, kv_channels, **options)

    monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], "DotProductAttention", Old)
    with pytest.raises(ConfigError, match=r"too old.*'softmax_type'"):
        layer()(*qkv(40), build_layout(BOUNDS, window=5))
    assert made == []


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("version", [None, OLD_CUDNN, NEW_CUDNN])
def test_common_widths_train_on_every_cudnn(monkeypatch: pytest.MonkeyPatch, width: int, version: int | None) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    check_sink_cudnn(width)


@pytest.mark.parametrize(("version", "shown"), [(None, "no cuDNN"), (91801, "cuDNN 9.18.1"), (92599, "cuDNN 9.25.99")])
def test_other_widths_need_a_new_cudnn(monkeypatch: pytest.MonkeyPatch, version: int | None, shown: str) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    with pytest.raises(TrainingError, match=rf"width 192 on {shown}.*3249.*9\.26"):
        check_sink_cudnn(192)
    for newer in (92600, 92601, 100000):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda newer=newer: newer)
        check_sink_cudnn(192)


def test_only_training_with_a_sink_asks_for_cudnn(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: OLD_CUDNN)
    layout = build_layout(BOUNDS, window=5)
    layer(sink=False)(*qkv(40), layout)
    te = layer()
    te.eval()(*qkv(40), layout)
    with pytest.raises(TrainingError, match=r"width 12 on cuDNN 9\.18\.1"):
        te.train()(*qkv(40), layout)


# -- the sink in state dicts, files and casts ------------------------------------------------------------------------


def test_names_of_the_state_dict(made: Made) -> None:
    reference, ours = pair(add_full_attention_sink_bias=False)
    ours(**packed(BOUNDS))  # the cores exist now, and add nothing
    theirs, mine = set(reference.state_dict()), set(ours.state_dict())
    assert theirs - mine == {f"model.layers.{i}.self_attn.attention_sink_bias" for i in (1, 2)}
    assert mine - theirs == {f"model.layers.{i}.self_attn.attn_module.softmax_offset" for i in (1, 2)}
    assert ours.model.layers["1"].self_attn.attention_sink_bias is None
    assert not any("softmax_offset" in name for name, _ in ours.named_parameters())
    assert set(ours.state_dict_adapter.to_hf(ours.state_dict())) == set(
        reference.state_dict_adapter.to_hf(reference.state_dict())
    )


def test_folders_do_not_depend_on_the_backend(made: Made, tmp_path: Path) -> None:
    reference, ours = pair()
    folder = saved(tmp_path / "sdpa", reference)
    expected = tensors_of(folder)
    found = tensors_of(saved(tmp_path / "te", ours))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert any("sink" in key and expected[key].any() for key in expected)

    loaded = MiMoV2FlashForCausalLM.from_pretrained(str(folder), backend=BackendConfig(attn="te"))
    for name, tensor in ours.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    sink = loaded.model.layers["1"].self_attn.attn_module.softmax_offset
    assert sink.dtype == torch.float32
    assert made == []


@pytest.mark.parametrize("after_use", [False, True])
def test_casts_pass_over_the_sink(made: Made, after_use: bool) -> None:
    _, ours = pair()
    if after_use:
        ours(**packed(BOUNDS))
    before = ours.model.layers["1"].self_attn.attn_module.softmax_offset.clone()
    ours.to(torch.bfloat16)
    sink = ours.model.layers["1"].self_attn.attn_module.softmax_offset
    assert sink.dtype == torch.float32
    assert torch.equal(sink, before)
    assert ours(**packed(BOUNDS)).logits.dtype == torch.bfloat16
    assert made[1].calls[-1]["query_layer"].dtype == torch.bfloat16


def test_a_model_on_meta_gets_its_sinks_with_its_memory(made: Made) -> None:
    with torch.device("meta"):
        model = MiMoV2FlashForCausalLM(tiny_config(), backend=BackendConfig(attn="te"))
    attention = model.model.layers["1"].self_attn
    assert attention.attn_module.softmax_offset.is_meta
    model.to_empty(device="cpu")
    attention.attn_module.softmax_offset.fill_(3.0)
    model.initialize_weights(dtype=torch.bfloat16)
    assert torch.equal(attention.attn_module.softmax_offset, torch.zeros(4))
    assert made == []


# -- streams that ranks share ----------------------------------------------------------------------------------------


def test_setup_installs_the_exchange(made: Made, group_of_eight: dist.ProcessGroup) -> None:
    stream = object()
    te = layer(heads=16, kv_heads=4, value_width=12, window=None)
    te(torch.randn(8, 16, 12), torch.randn(8, 4, 12), torch.randn(8, 4, 12), build_layout([0, 8], window=None))
    te.share(group_of_eight, stream)
    alone, core = made
    assert alone.context is None
    assert core.context == (group_of_eight, list(range(8)), stream, "a2a")
    assert core.groups == 8  # 4 heads for 8 ranks: each is there twice
    layer(heads=16, kv_heads=16).share(group_of_eight, stream)
    assert made[-1].groups == 16


def test_heads_that_do_not_divide_are_refused(made: Made, group_of_eight: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (group_of_eight.size(),))
    _, ours = pair()
    with pytest.raises(ConfigError, match=r"requires both query and key/value head counts.* 4 and 1"):
        ours.model.layers["0"].self_attn.setup_cp_attention(mesh, object())
    assert made == []
