"""What the model returns, what it must not allocate, and the inputs it refuses."""

from typing import Any

import pytest
import torch
from tiny_text import VOCAB, tiny_config, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from automimo.errors import ConfigError
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, compute_lm_head_logits
from automimo.moe import expert_load

# -- outputs ----------------------------------------------------------------------------------------------------------


def test_logits_to_keep() -> None:
    model = tiny_model().eval()
    ids = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        all_logits = model(ids).logits
        stream = model(ids.flatten(), cu_seqlens=torch.tensor([0, 9, 18])).logits
        assert stream.shape == (1, 18, VOCAB)
        for keep, expected in ((0, slice(None)), (1, slice(8, 9)), (4, slice(5, 9)), (99, slice(None))):
            found = model(ids, logits_to_keep=keep).logits
            torch.testing.assert_close(found, all_logits[:, expected], rtol=1e-6, atol=1e-6)
        picked = torch.tensor([8, 0, 3])
        found = model(ids, logits_to_keep=picked).logits
        torch.testing.assert_close(found, all_logits[:, picked], rtol=1e-6, atol=1e-6)
        found = model(ids.flatten(), cu_seqlens=torch.tensor([0, 9, 18]), logits_to_keep=2).logits
        torch.testing.assert_close(found, stream[:, 16:], rtol=1e-6, atol=1e-6)
        ends = torch.tensor([8, 17])
        found = model(ids.flatten(), cu_seqlens=torch.tensor([0, 9, 18]), logits_to_keep=ends).logits
        assert found.shape == (1, 2, VOCAB)
        torch.testing.assert_close(found[0], all_logits[:, 8], rtol=1e-5, atol=1e-5)


def test_without_a_head_the_logits_are_the_states() -> None:
    states = torch.randn(2, 3, 4)
    assert compute_lm_head_logits(None, states).logits is not None
    torch.testing.assert_close(compute_lm_head_logits(None, states, 1).logits, states[:, -1:])
    assert compute_lm_head_logits(None, states[0], is_thd=True).logits.shape == (1, 3, 4)


def test_loss_is_the_sum_over_valid_targets() -> None:
    model = tiny_model()
    ids = torch.randint(0, VOCAB, (2, 9))
    targets = torch.randint(0, VOCAB, (2, 9))
    targets[0, 3:6] = -100
    logits = model(ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    for chunk in (1, 4, 1024):
        output = model(ids, targets=targets, loss_chunk=chunk)
        assert output.logits is None
        assert output.loss.dtype == torch.float32
        torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0)


def test_expert_counts_only_in_training() -> None:
    model = tiny_model().eval()
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert int(expert_load(model).sum()) == 0
    model.train()
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert expert_load(model).sum(1).tolist() == [8, 8, 8]


# -- memory -----------------------------------------------------------------------------------------------------------


class LargestStorage(TorchDispatchMode):
    """Bytes of the largest storage that any operation returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


def largest(model: MiMoV2FlashForCausalLM, ids: Tensor, cu_seqlens: Tensor) -> int:
    targets = ids.roll(-1)
    with LargestStorage() as mode:
        model(ids, cu_seqlens=cu_seqlens, targets=targets, loss_chunk=256).loss.backward()
    return mode.nbytes


CUTS = {"one": [0, 4096], "four": [0, 1000, 1001, 1100, 4096], "many": list(range(0, 4097, 64))}
TWO_HEADS = {"num_attention_heads": 2, "swa_num_attention_heads": 2}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_no_square_and_no_full_logits(cuts: list[int]) -> None:
    """T = 4096, V = 3000: a T x T mask of booleans is 16 MiB, full fp32 logits are 47 MiB."""
    config = tiny_config(num_hidden_layers=2, hybrid_layer_pattern=[0, 1], vocab_size=3000, **TWO_HEADS)
    ids = torch.randint(0, 3000, (4096,))
    # The largest is a strip of scores of the full layer: a few hundred rows x 2 heads x 4096 keys in fp32.
    assert largest(tiny_model(config), ids, torch.tensor(cuts)) < 4096 * 4096


def test_the_memory_probe_sees_a_square() -> None:
    config = tiny_config(num_hidden_layers=1, hybrid_layer_pattern=[1], **TWO_HEADS)
    ids = torch.randint(0, VOCAB, (1024,))
    assert largest(tiny_model(config, attn="eager"), ids, torch.tensor([0, 1024])) >= 2 * 1024 * 1024 * 4


# -- errors -----------------------------------------------------------------------------------------------------------

IDS = torch.zeros(2, 6, dtype=torch.int64)
STREAM = torch.zeros(6, dtype=torch.int64)
CU = torch.tensor([0, 2, 6])
SQUARE = torch.ones(2, 1, 6, 6, dtype=torch.bool)

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "input_ids or inputs_embeds"),
    "thd of rank 3": ({"input_ids": IDS.unsqueeze(0), "cu_seqlens": CU}, r"\[T\] or \[1, T\]"),
    "thd embeddings of rank 4": ({"inputs_embeds": torch.zeros(1, 1, 6, 32), "cu_seqlens": CU}, r"\[T\] or \[1, T\]"),
    "thd with two rows": ({"input_ids": IDS, "cu_seqlens": CU}, "batch size 1, got 2"),
    "thd embeddings with two rows": ({"inputs_embeds": torch.zeros(2, 6, 32), "cu_seqlens": CU}, "batch size 1, got 2"),
    "thd without boundaries": ({"input_ids": STREAM, "qkv_format": "thd"}, "from make_cp_batch_for_te"),
    "two rows of boundaries": ({"input_ids": STREAM, "cu_seqlens": CU.expand(2, -1)}, "one row, got 2"),
    "two rows of padded boundaries": (
        {"input_ids": STREAM, "cu_seqlens": CU, "cu_seqlens_padded": CU.expand(2, -1)},
        "cu_seqlens_padded must be one row, got 2",
    ),
    "two rows beside padded boundaries": (
        {"input_ids": STREAM, "cu_seqlens": CU.expand(2, -1), "cu_seqlens_padded": CU},
        "cu_seqlens must be one row, got 2",
    ),
    "max_seqlen per document": (
        {"input_ids": STREAM, "cu_seqlens": CU, "max_seqlen": torch.tensor([2, 4])},
        "max_seqlen must be a scalar",
    ),
    "boundaries too short": ({"input_ids": STREAM, "cu_seqlens": torch.tensor([0, 5])}, "end at 5 .* 6 tokens"),
    "boundaries too long": ({"input_ids": STREAM, "cu_seqlens": torch.tensor([0, 7])}, "end at 7 .* 6 tokens"),
    "boundaries from 1": ({"input_ids": STREAM, "cu_seqlens": torch.tensor([1, 6])}, "start at 0"),
    "boundaries that fall": ({"input_ids": STREAM, "cu_seqlens": torch.tensor([0, 4, 3, 6])}, "decrease"),
    "boundaries only of sentinels": ({"input_ids": STREAM, "cu_seqlens": torch.tensor([-1000])}, "start at 0"),
    "positions of another length": (
        {"input_ids": STREAM, "cu_seqlens": CU, "position_ids": torch.arange(1)},
        r"position_ids has shape \[1\] .* 6 tokens",
    ),
    "padding mask of another length": (
        {"input_ids": STREAM, "cu_seqlens": CU, "padding_mask": torch.zeros(4, dtype=torch.bool)},
        r"padding_mask has shape \[4\] .* 6 tokens",
    ),
    "flat ids without boundaries": ({"input_ids": STREAM}, r"must be \[B, S\]"),
    "ids of rank 3": ({"input_ids": IDS.unsqueeze(0)}, r"must be \[B, S\]"),
    "embeddings of rank 2 without boundaries": ({"inputs_embeds": torch.zeros(6, 32)}, r"must be \[B, S\]"),
    "batch positions of another length": (
        {"input_ids": IDS, "position_ids": torch.arange(5)},
        r"position_ids has shape \[5\]",
    ),
    "batch positions of another batch": (
        {"input_ids": IDS, "position_ids": torch.zeros(3, 6, dtype=torch.int64)},
        r"position_ids has shape \[3, 6\]",
    ),
    "batch padding mask of one row": (
        {"input_ids": IDS, "padding_mask": torch.zeros(6, dtype=torch.bool), "attention_mask": torch.ones(2, 6)},
        r"padding_mask has shape \[6\]",
    ),
    "mask of another shape": ({"input_ids": IDS, "attention_mask": torch.ones(2, 5)}, r"\(2, 5\)"),
    "mask of rank 3": ({"input_ids": IDS, "attention_mask": torch.ones(2, 6, 6)}, "2-D or 4-D, got 3-D"),
    "4-D mask of another length": ({"input_ids": IDS, "attention_mask": SQUARE[..., :5]}, r"\(2, 1, 6, 5\)"),
    "4-D mask of another batch": (
        {"input_ids": IDS, "attention_mask": torch.ones(3, 1, 6, 6, dtype=torch.bool)},
        r"\(3, 1, 6, 6\)",
    ),
    "4-D mask of integers": ({"input_ids": IDS, "attention_mask": SQUARE.long()}, "4-D attention_mask is bool"),
    "unknown dictionary entry": ({"input_ids": IDS, "attention_mask": {"full": SQUARE}}, "unknown entry 'full'"),
    "incomplete dictionary": (
        {"input_ids": IDS, "attention_mask": {"full_attention": SQUARE}},
        "no 'sliding_attention'",
    ),
    "dictionary of 2-D masks": (
        {"input_ids": IDS, "attention_mask": {"full_attention": IDS + 1, "sliding_attention": IDS + 1}},
        "full_mask",
    ),
    "context parallel": ({"input_ids": STREAM, "cu_seqlens": CU, "cp_size": 2}, "cp_size is 2"),
    "pixels": ({"input_ids": IDS, "pixel_values": torch.zeros(4, 8)}, "non-empty vision_config"),
    "video": ({"input_ids": IDS, "pixel_values_videos": torch.zeros(4, 8)}, "non-empty vision_config"),
    "targets of another size": ({"input_ids": IDS, "targets": STREAM}, "targets"),
    "target outside the vocabulary": ({"input_ids": IDS, "targets": IDS + VOCAB}, f"target {VOCAB} .* vocabulary"),
}


@pytest.mark.parametrize("name", BAD)
def test_inputs_that_contradict_each_other(name: str) -> None:
    inputs, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        tiny_model()(**inputs)


def test_unknown_keys_of_a_loader_are_ignored() -> None:
    model = tiny_model().eval()
    with torch.no_grad():
        plain = model(STREAM, cu_seqlens=CU).logits
        extra = model(STREAM, cu_seqlens=CU, seq_lens=CU, seq_lens_padded=CU, cp_rank=0, labels_from="x", max_seqlen=4)
    assert torch.equal(plain, extra.logits)


def test_both_moe_settings_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match="Cannot pass both moe_config and moe_overrides"):
        MiMoV2FlashForCausalLM(tiny_config(), model.model.moe_config, moe_overrides={"aux_loss_coeff": 0.1})
    with pytest.raises(TypeError, match="'surprise'"):
        MiMoV2FlashForCausalLM(tiny_config(), surprise=1)


def test_accessors() -> None:
    model = tiny_model()
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    new = torch.nn.Embedding(VOCAB, 32)
    model.set_input_embeddings(new)
    assert model.model.embed_tokens is new
    head = type(model.lm_head)(32, VOCAB)
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is model.lm_head is head
