"""The MiMo adapter around the packed sharder: masks of media, indices, side channel, errors, and the model's hooks."""

from typing import Any

import pytest
import torch
from cp_oracle import FILLER, ROWS, FakeMesh, NamedMesh, Rows, packed_rows, share_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import VOCAB, tiny_config, tiny_model
from torch import nn

from automimo.backend import BackendConfig
from automimo.distributed.context import ContextParallelSharder
from automimo.errors import ConfigError
from automimo.mimo_v2_flash import cp
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM

KEYS = ("input_ids", "labels", "position_ids", "padding_mask")
IMAGE, VIDEO = 7, 9  # no ids of the oracle


def test_flatten_chunks() -> None:
    rows = torch.arange(12).view(4, 3)
    assert cp._flatten_chunks(rows, 1).tolist() == list(range(12))
    assert cp._flatten_chunks(rows, 2).tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert cp._flatten_chunks(rows, 4).tolist() == rows.tolist()
    with pytest.raises(ValueError, match="4 rows cannot be divided among num_chunks 3"):
        cp._flatten_chunks(rows, 3)
    with pytest.raises(ValueError, match=r"shape \[12\]"):
        cp._flatten_chunks(rows.flatten(), 1)
    with pytest.raises(ValueError, match=r"shape \[4, 3, 1\]"):
        cp._flatten_chunks(rows.unsqueeze(-1), 1)


def test_media_mask() -> None:
    ids = torch.tensor([[IMAGE, 1, 2], [3, IMAGE, IMAGE]])
    assert cp._media_mask(ids, None, 1) is None
    assert cp._media_mask(ids, IMAGE, 1).tolist() == [True, False, False, False, True, True]
    assert cp._media_mask(ids, IMAGE, 2).tolist() == [[True, False, False], [False, True, True]]
    assert cp._media_mask(ids, 0, 1).tolist() == [False] * 6
    with pytest.raises(ValueError, match="num_chunks 3"):
        cp._media_mask(ids, IMAGE, 3)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_partition_indices_of_every_chunk(data: st.DataObject, size: int, chunks: int) -> None:
    rows = data.draw(packed_rows(size, chunks))
    for rank in range(size):
        indices = cp._chunk_partition_indices(rows.batch(), FakeMesh(size, rank), chunks, FILLER)
        assert indices.dtype == torch.int64
        expected = []
        for chunk in range(chunks):
            lengths = rows.places(chunk, chunks)
            expected.append(share_of(lengths, size, rank) if size > 1 else list(range(sum(lengths))))
        assert indices.tolist() == (expected if chunks > 1 else expected[0])


def test_partition_indices_without_a_mesh() -> None:
    assert cp._chunk_partition_indices(ROWS.batch(), None, 2, FILLER).tolist() == [list(range(48))] * 2


PARTITION_ERRORS = {
    "ids": (torch.zeros(16), [[16]], r"shape \[16\]"),
    "lengths": (torch.zeros(1, 16), [16], r"seq_lens_padded must be .* \[1\]"),
    "rows": (torch.zeros(2, 16), [[16]], "seq_lens_padded has 1 rows, but input_ids 2"),
    "too few": (torch.zeros(1, 16), [[8, 4]], r"chunk 0: seq_lens_padded \[8, 4\] sum to 12, .* 16 tokens"),
    "too many": (torch.zeros(2, 8), [[8], [12]], r"\[8, 12\] sum to 20, but the chunk has 16 tokens"),
    "negative": (torch.zeros(1, 16), [[20, -4]], r"must be positive, got \[20, -4\]"),
    "zero": (torch.zeros(1, 16), [[16, 0]], r"must be positive, got \[16, 0\]"),
    "none": (torch.zeros(1, 16), [[FILLER]], r"must be positive, got \[\]"),
    "divisible": (torch.zeros(1, 16), [[10, 6]], r"10 tokens.*divisible by 2 \* cp_size = 4"),
}


@pytest.mark.parametrize("case", PARTITION_ERRORS.values(), ids=PARTITION_ERRORS.keys())
def test_partition_errors(case: tuple[Any, Any, str]) -> None:
    ids, lengths, message = case
    with pytest.raises(ValueError, match=message):
        cp._chunk_partition_indices(
            {"input_ids": ids, "seq_lens_padded": torch.tensor(lengths)}, FakeMesh(2), 1, FILLER
        )


def test_partition_error_of_the_second_chunk() -> None:
    batch = {"input_ids": torch.zeros(2, 8), "seq_lens_padded": torch.tensor([[8, FILLER], [4, 8]])}
    with pytest.raises(ValueError, match=r"chunk 1: seq_lens_padded \[4, 8\] sum to 12, but the chunk has 8"):
        cp._chunk_partition_indices(batch, FakeMesh(2), 2, FILLER)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_media_and_indices_are_those_of_the_whole_batch(size: int, chunks: int) -> None:
    media = object()
    batch = ROWS.batch(_vlm_pp_media_chunks=media, other=3)
    batch["input_ids"][0, 4] = batch["input_ids"][1, 0] = batch["input_ids"][3, 20] = IMAGE
    batch["input_ids"][2, 23] = VIDEO
    given_keys = set(batch)
    for rank in range(size):
        context, result, layout = cp.shard_batch_for_mimo_te(
            FakeMesh(size, rank), None, batch, num_chunks=chunks, image_token_id=IMAGE, video_token_id=VIDEO
        )
        with context():
            pass
        assert set(batch) == given_keys
        assert result["_vlm_pp_media_chunks"] is media
        for key, token in (("_mimo_global_image_mask", IMAGE), ("_mimo_global_video_mask", VIDEO)):
            expected = batch["input_ids"] == token
            assert torch.equal(result[key], expected.view(-1) if chunks == 1 else expected.view(chunks, -1))
            assert int(result[key].sum()) == {IMAGE: 3, VIDEO: 1}[token]
        indices = result["_mimo_thd_local_indices"]
        streams = batch["input_ids"].view(chunks, -1)
        for chunk in range(chunks):
            own = indices if chunks == 1 else indices[chunk]
            lengths = ROWS.places(chunk, chunks)
            assert own.tolist() == (share_of(lengths, size, rank) if size > 1 else list(range(sum(lengths))))
            ids = result["input_ids"] if chunks == 1 else result["input_ids"][chunk]
            assert torch.equal(ids, streams[chunk][own])
        if chunks > 1:
            assert layout is None
        else:
            assert layout.local_token_global_indices.tolist() == indices.tolist()
            assert (layout.padded_seq_len, layout.input_row_shape) == (96, (4, 24))
            assert result["other"] == 3


def test_without_media_nothing_is_added_but_indices() -> None:
    _, result, _ = cp.shard_batch_for_mimo_te(FakeMesh(2), None, ROWS.batch(), image_token_id=IMAGE)
    added = {key for key in result if key.startswith(("_mimo", "_vlm"))}
    assert added == {"_mimo_global_image_mask", "_mimo_thd_local_indices"}


def test_each_rank_finds_its_rows_of_the_media_features() -> None:
    batch = ROWS.batch()
    places = [0, 5, 6, 7, 40, 41, 42, 90]
    batch["input_ids"].view(-1)[places] = IMAGE
    found = {}
    for rank in range(4):
        _, result, _ = cp.shard_batch_for_mimo_te(FakeMesh(4, rank), None, batch, image_token_id=IMAGE)
        rows = MiMoV2FlashForCausalLM._local_modal_feature_indices(
            result["_mimo_global_image_mask"], result["_mimo_thd_local_indices"]
        )
        assert rows.dtype == torch.int64
        local = [p for p, token in zip(share_of(ROWS.places(0, 1), 4, rank), result["input_ids"], strict=True)
                 if token == IMAGE]  # fmt: skip
        assert rows.tolist() == [places.index(place) for place in local]
        found.update(dict.fromkeys(rows.tolist(), rank))
    assert sorted(found) == list(range(8))


def test_feature_indices_errors() -> None:
    find = MiMoV2FlashForCausalLM._local_modal_feature_indices
    mask = torch.tensor([[True, False, True]])
    assert find(None, None) is None
    assert find(None, torch.tensor([7])) is None
    assert find(mask, torch.tensor([[2, 1, 0]])).tolist() == [1, 0]
    assert find(mask[0], torch.zeros(0, dtype=torch.int64)).tolist() == []
    with pytest.raises(ValueError, match="requires TE local-token global indices"):
        find(mask, None)
    with pytest.raises(ValueError, match="from 0 to 3, but the mask has 3"):
        find(mask, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="from -1 to 0, but the mask has 3"):
        find(mask, torch.tensor([0, -1]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def setup_cp_attention(self, cp_mesh: Any, cp_stream: Any = None) -> None:
        self.calls.append((cp_mesh, cp_stream))


def model_of(attention: nn.Module) -> nn.Module:
    model = nn.Module()
    model.self_attn = attention
    return model


def test_the_attention_is_set_up_before_a_batch_is_cut() -> None:
    attention, mesh = Attention(), FakeMesh(2, 1, group=object())
    model = model_of(attention)
    for _ in range(3):
        cp.shard_batch_for_mimo_te(mesh, None, ROWS.batch(), model=model)
    assert attention.calls == [(mesh, None)]
    cp.shard_batch_for_mimo_te(None, None, ROWS.batch(), model=model_of(nn.Linear(1, 1)))  # one rank: not looked at


BATCH_ERRORS = {
    "loss mask": ({}, {"loss_mask": torch.ones(4, 24)}, r"shape \[4, 24\].*not supported"),
    "format": ({"qkv_format": "bshd"}, {}, "'bshd'.*packing_strategy: thd"),
    "no format (neat)": ({"qkv_format": None, "attention_mask": torch.ones(4, 24)}, {}, "None.*packing_strategy: thd"),
    "mRoPE in chunks": (
        {"position_ids": torch.zeros(3, 4, 24)},
        {"num_chunks": 2},
        r"num_chunks 2 needs position_ids .* \[3, 4, 24\]",
    ),
    "chunks": ({}, {"num_chunks": 3}, "4 rows cannot be divided among num_chunks 3"),
}


@pytest.mark.parametrize("case", BATCH_ERRORS.values(), ids=BATCH_ERRORS.keys())
def test_refused_batches(case: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    changes, arguments, message = case
    with pytest.raises(ConfigError, match=message):
        cp.shard_batch_for_mimo_te(FakeMesh(2), None, ROWS.batch(**changes), **arguments)


@pytest.mark.parametrize("key", ["seq_lens", "seq_lens_padded"])
def test_missing_lengths(key: str) -> None:
    batch = ROWS.batch()
    del batch[key]
    with pytest.raises(KeyError, match=f"{key} is missing"):
        cp.shard_batch_for_mimo_te(FakeMesh(2), None, batch)


def test_a_refused_batch_leaves_the_model_alone() -> None:
    attention = Attention()
    with pytest.raises(ConfigError):
        cp.shard_batch_for_mimo_te(FakeMesh(2, group=object()), None, {"qkv_format": "bshd"}, model=model_of(attention))
    assert not attention.calls


def test_mrope_of_one_chunk() -> None:
    batch = ROWS.batch()
    batch["position_ids"] = torch.stack([batch["position_ids"]] * 3)
    _, result, _ = cp.shard_batch_for_mimo_te(FakeMesh(2), None, batch)
    assert result["position_ids"].shape == (3, 48)


def test_the_sharder_is_an_unresolved_strategy() -> None:
    model = nn.Linear(1, 1)
    sharder = cp.make_mimo_te_cp_sharder(model=model, num_chunks=2, image_token_id=IMAGE, video_token_id=None)
    assert isinstance(sharder, ContextParallelSharder)
    assert sharder.local_token_global_indices is None
    assert sharder.layout is None
    assert sharder.cp_mesh is None
    assert sharder.shard_batch.keywords == {
        "model": model, "num_chunks": 2, "image_token_id": IMAGE, "video_token_id": None
    }  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_prepares_packed_batches(attention: str) -> None:
    config = tiny_config(image_token_id=IMAGE)
    model = MiMoV2FlashForCausalLM(config, backend=BackendConfig(attn=attention))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    answer = model.prepare_model_inputs_for_cp(ROWS.batch(), num_chunks=2)
    assert list(answer) == ["cp_sharder"]
    assert answer["cp_sharder"].shard_batch.keywords == {
        "model": model, "num_chunks": 2, "image_token_id": IMAGE, "video_token_id": None
    }  # fmt: skip
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(block.self_attn.context is None for block in model.model.layers.values())
    with pytest.raises(ValueError, match=r"'bshd'.*packing_strategy: thd"):
        model.prepare_model_inputs_for_cp({"qkv_format": "bshd"})


def test_the_model_takes_what_its_strategy_made() -> None:
    model = tiny_model()
    batch = Rows([[(5, 8), (3, 8)]]).batch()
    batch["input_ids"] %= VOCAB
    sharder = ContextParallelSharder(model, NamedMesh(1), batch)
    _, result = sharder.shard(batch)
    assert result["_mimo_thd_local_indices"].tolist() == list(range(16))
    with torch.no_grad():
        logits = model(**result).logits
        for start, real in ((0, 5), (8, 3)):
            alone = model(batch["input_ids"][:, start : start + real]).logits
            torch.testing.assert_close(logits[:, start : start + real], alone)


def test_the_decoder_gets_no_places_of_media() -> None:
    given = {"_mimo_global_image_mask": 1, "_mimo_global_video_mask": 2, "_mimo_thd_local_indices": 3, "cp_size": 4}
    assert cp.without_media_places(given) == {"cp_size": 4}
