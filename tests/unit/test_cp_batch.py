"""make_cp_batch_for_te against rows that were cut token by token."""

import sys
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from cp_oracle import FILLER, PAD, ROWS, FakeMesh, Rows, owner_of, packed_rows, share_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from automimo.distributed.context import make_cp_batch_for_te, thd_partition
from automimo.distributed.context.te_batch import check_rule_of_te
from automimo.errors import ConfigError

KEYS = ("input_ids", "labels", "position_ids", "padding_mask")


def starts(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def rows_without_filler(boundaries: Tensor) -> list[list[int]]:
    rows = boundaries.tolist() if boundaries.dim() == 2 else [boundaries.tolist()]
    return [[value for value in row if value != FILLER] for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]).flatmap(lambda size: st.tuples(st.just(size), packed_rows(size))))
def test_the_partition_is_that_of_the_rule(case: tuple[int, Rows]) -> None:
    size, rows = case
    lengths = rows.places(0, 1)
    for rank in range(size):
        if size > 1:
            assert thd_partition(starts(lengths), size, rank).tolist() == share_of(lengths, size, rank)


def test_the_oracle_on_a_case_by_hand() -> None:
    # A document of 8 places has chunks 01 23 45 67: rank 0 has the first and the last.
    assert share_of([8, 4], 2, 0) == [0, 1, 6, 7, 8, 11]
    assert share_of([8, 4], 2, 1) == [2, 3, 4, 5, 9, 10]
    assert [owner_of(place, 8, 4) for place in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_tokens_labels_positions_and_padding_follow_their_tokens(data: st.DataObject, size: int, chunks: int) -> None:
    rows = data.draw(packed_rows(size, chunks))
    batch = rows.batch()
    for rank in range(size):
        result = make_cp_batch_for_te(FakeMesh(size, rank), batch, num_chunks=chunks)
        for key in KEYS:
            expected = []
            for chunk in range(chunks):
                stream = rows.stream(key, chunk, chunks)
                mine = share_of(rows.places(chunk, chunks), size, rank) if size > 1 else range(len(stream))
                expected.append([stream[place] for place in mine])
            assert result[key].tolist() == (expected if chunks > 1 else expected[0]), key
            assert result[key].dtype == (torch.bool if key == "padding_mask" else torch.int64)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([2, 4]), st.sampled_from([1, 2]))
def test_boundaries_of_several_ranks_are_those_of_all_places(data: st.DataObject, size: int, chunks: int) -> None:
    rows = data.draw(packed_rows(size, chunks))
    result = make_cp_batch_for_te(FakeMesh(size, size - 1), rows.batch(), num_chunks=chunks)
    places = [rows.places(chunk, chunks) for chunk in range(chunks)]
    assert rows_without_filler(result["cu_seqlens"]) == [starts(lengths) for lengths in places]
    assert result["cu_seqlens"].dtype == torch.int32
    assert "cu_seqlens_padded" not in result
    assert result["max_seqlen"].tolist() == ([max(p) for p in places] if chunks > 1 else max(places[0]))
    assert (result["cp_size"], result["cp_rank"], result["qkv_format"]) == (size, size - 1, "thd")


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2]))
def test_boundaries_of_one_rank_are_of_tokens_and_of_places(data: st.DataObject, chunks: int) -> None:
    rows = data.draw(packed_rows(1, chunks))
    result = make_cp_batch_for_te(None, rows.batch(), num_chunks=chunks)
    places = [rows.places(chunk, chunks) for chunk in range(chunks)]
    tokens = [rows.tokens(chunk, chunks) for chunk in range(chunks)]
    for chunk in range(chunks):
        if all(n == m for n, m in zip(tokens[chunk][:-1], places[chunk][:-1], strict=True)):
            tokens[chunk][-1] = places[chunk][-1]  # a tail of padding is part of the last document
    assert rows_without_filler(result["cu_seqlens"]) == [starts(lengths) for lengths in tokens]
    assert ("cu_seqlens_padded" in result) == (tokens != places)
    if tokens != places:
        assert rows_without_filler(result["cu_seqlens_padded"]) == [starts(lengths) for lengths in places]
    assert result["max_seqlen"].tolist() == ([max(n) for n in tokens] if chunks > 1 else max(tokens[0]))
    assert "cp_size" not in result


def test_shorter_rows_of_boundaries_are_filled_up() -> None:
    result = make_cp_batch_for_te(FakeMesh(2), ROWS.batch(), num_chunks=2)
    assert result["cu_seqlens"].tolist() == [[0, 8, 24, 32, 40, 48], [0, 24, 48, FILLER, FILLER, FILLER]]
    filled = Rows(ROWS.documents).batch()
    for key in ("seq_lens", "seq_lens_padded"):
        filled[key] = torch.where(filled[key] == FILLER, -7, filled[key])
    result = make_cp_batch_for_te(FakeMesh(2), filled, num_chunks=2, seq_lens_padding_value=-7)
    assert result["cu_seqlens"].tolist() == [[0, 8, 24, 32, 40, 48], [0, 24, 48, -7, -7, -7]]


@pytest.mark.parametrize("size", [1, 2])
def test_embeddings_and_mrope_positions(size: int) -> None:
    batch = ROWS.batch()
    ids = batch["input_ids"]
    embeddings = torch.stack([ids, ids * 2], -1).to(torch.bfloat16)
    mrope = torch.stack([batch["position_ids"], batch["position_ids"] + 7, ids])
    batch.update(input_ids=embeddings, position_ids=mrope)
    plain = make_cp_batch_for_te(FakeMesh(size, size - 1), ROWS.batch())
    result = make_cp_batch_for_te(FakeMesh(size, size - 1), batch)
    expected = torch.stack([plain["input_ids"], plain["input_ids"] * 2], -1).to(torch.bfloat16)
    torch.testing.assert_close(result["input_ids"], expected, rtol=0, atol=0)
    assert result["position_ids"].shape == (3, plain["input_ids"].numel())
    assert torch.equal(result["position_ids"][0], plain["position_ids"])
    assert torch.equal(result["position_ids"][1], plain["position_ids"] + 7)
    assert torch.equal(result["position_ids"][2], plain["input_ids"])

    two = make_cp_batch_for_te(FakeMesh(size, size - 1), batch, num_chunks=2)
    plain_two = make_cp_batch_for_te(FakeMesh(size, size - 1), ROWS.batch(), num_chunks=2)
    assert two["position_ids"].shape == (2, 3, plain["input_ids"].numel() // 2)
    assert torch.equal(two["position_ids"][:, 2], plain_two["input_ids"])
    del batch["input_ids"]
    result = make_cp_batch_for_te(FakeMesh(size, size - 1), batch | {"inputs_embeds": embeddings})
    torch.testing.assert_close(result["inputs_embeds"], expected, rtol=0, atol=0)


def test_missing_positions_are_counted_from_each_document() -> None:
    batch = ROWS.batch()
    expected = make_cp_batch_for_te(FakeMesh(4, 3), batch)["position_ids"]
    del batch["position_ids"]
    assert torch.equal(make_cp_batch_for_te(FakeMesh(4, 3), batch)["position_ids"], expected)


def test_ids_become_int64_and_the_batch_is_left_as_it_was() -> None:
    batch = ROWS.batch()
    batch["input_ids"] = batch["input_ids"].int()
    before = dict(batch)
    result = make_cp_batch_for_te(FakeMesh(2), batch)
    assert result["input_ids"].dtype == torch.int64
    assert batch.keys() == before.keys()
    assert all(batch[key] is before[key] for key in batch)


@pytest.mark.parametrize("size", [1, 2])
def test_unknown_keys_are_kept_for_one_stream(size: int) -> None:
    note, pixels = object(), torch.zeros(3)
    batch = ROWS.batch(note=note, pixel_values=pixels)
    result = make_cp_batch_for_te(FakeMesh(size), batch)
    assert result["note"] is note
    assert result["pixel_values"] is pixels
    assert "seq_lens" not in result
    assert "seq_lens_padded" not in result
    assert "note" not in make_cp_batch_for_te(FakeMesh(size), batch, num_chunks=2)


def test_local_indices() -> None:
    for rank in range(4):
        _, indices = make_cp_batch_for_te(FakeMesh(4, rank), ROWS.batch(), return_local_indices=True)
        assert indices.dtype == torch.int64
        assert indices.tolist() == share_of(ROWS.places(0, 1), 4, rank)
    _, indices = make_cp_batch_for_te(None, ROWS.batch(), return_local_indices=True)
    assert indices.tolist() == list(range(96))
    for mesh in (None, FakeMesh(2)):
        _, indices = make_cp_batch_for_te(mesh, ROWS.batch(), num_chunks=2, return_local_indices=True)
        assert indices is None


def row(**changes: Any) -> dict[str, Any]:
    return {
        "input_ids": torch.arange(8).view(1, 8),
        "seq_lens": torch.tensor([[4, 3]]),
        "seq_lens_padded": torch.tensor([[4, 4]]),
        **changes,
    }


WRONG = {
    "format argument": (row(), {"qkv_format": "bshd"}, r"'bshd'.*thd"),
    "format of the batch": (row(qkv_format="sbhd"), {}, r"'sbhd'.*thd"),
    "no chunk": (row(), {"num_chunks": 0}, "at least 1, got 0"),
    "rows and chunks": (row(), {"num_chunks": 3}, "1 rows cannot be divided among num_chunks 3"),
    "cut twice": (row(cp_size=4, cp_rank=2), {}, "already the share of rank 2 of 4"),
    "a row not filled": (
        row(seq_lens_padded=torch.tensor([[4, 3]])),
        {},
        r"row 0: seq_lens_padded \[4, 3\] sum to 7, but the row has 8",
    ),
    "more tokens than places": (row(seq_lens=torch.tensor([[5, 3]])), {}, "row 0: .*seq_lens 5 .*seq_lens_padded 4"),
    "no places": (
        row(seq_lens=torch.tensor([[4, 3, 0]]), seq_lens_padded=torch.tensor([[4, 4, 0]])),
        {},
        "seq_lens 0 .*seq_lens_padded 0",
    ),
    "another filler": (
        row(seq_lens=torch.tensor([[4, 3, -1]]), seq_lens_padded=torch.tensor([[4, 4, -1]])),
        {},
        "seq_lens -1 .*fillers are -1000",
    ),
    "numbers of documents": (
        row(seq_lens=torch.tensor([[4, FILLER]])),
        {},
        "row 0: seq_lens has 1 documents, but seq_lens_padded has 2",
    ),
    "rows of lengths": (
        row(seq_lens=torch.tensor([[4, 3]] * 2)),
        {},
        "1 rows, but seq_lens of 2 and seq_lens_padded of 1",
    ),
    "lengths of one dimension": (row(seq_lens=torch.tensor([4, 3])), {}, r"seq_lens must be .* got shape \[2\]"),
    "ids of one dimension": (row(input_ids=torch.arange(8)), {}, r"must be \[B, S\].* got \[8\]"),
    "labels of another shape": (row(labels=torch.zeros(1, 7)), {}, r"labels has shape \[1, 7\].* \[1, 8\]"),
    "positions of another shape": (
        row(position_ids=torch.zeros(3, 1, 7)),
        {},
        r"position_ids has shape \[1, 7, 3\].* \[1, 8\]",
    ),
    "a stream without boundaries": ({"input_ids": torch.arange(8)}, {}, "needs cu_seqlens"),
    "chunks of a stream": (
        {"input_ids": torch.arange(8), "cu_seqlens": torch.tensor([0, 8])},
        {"num_chunks": 2},
        "cannot be divided among num_chunks 2",
    ),
    "boundaries that end elsewhere": (
        {"input_ids": torch.arange(8), "cu_seqlens": torch.tensor([0, 3, 7])},
        {},
        r"\[3, 4\] tokens in \[3, 4\] places do not make up a stream of 8",
    ),
    "boundaries that fall": (
        {"input_ids": torch.arange(8), "cu_seqlens": torch.tensor([0, 9, 8])},
        {},
        r"cu_seqlens must rise from 0, got \[0, 9, 8\]",
    ),
    "several rows of boundaries": (
        {"input_ids": torch.arange(8), "cu_seqlens": torch.tensor([[0, 8], [0, 8]])},
        {},
        r"cu_seqlens must be one row.* \[2, 2\]",
    ),
    "a stream of several rows": (
        {"input_ids": torch.arange(8).view(2, 4), "cu_seqlens": torch.tensor([0, 4])},
        {},
        r"input_ids has shape \[2, 4\], but the stream has 4",
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_what_contradicts_itself_is_named_with_its_numbers(case: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    batch, arguments, message = case
    with pytest.raises(ConfigError, match=message):
        make_cp_batch_for_te(None, batch, **arguments)


def test_documents_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"document 0 has 4 tokens.*divisible by 2 \* cp_size = 8"):
        make_cp_batch_for_te(FakeMesh(4), row())


@pytest.mark.parametrize("key", ["seq_lens", "seq_lens_padded"])
@pytest.mark.parametrize("how", ["absent", "None"])
def test_missing_lengths(key: str, how: str) -> None:
    batch = row()
    batch[key] = None
    if how == "absent":
        del batch[key]
    with pytest.raises(KeyError, match=f"{key} is missing"):
        make_cp_batch_for_te(None, batch)
    with pytest.raises(KeyError, match="seq_lens is missing"):
        make_cp_batch_for_te(None, {"input_ids": torch.arange(8).view(2, 4)})


def test_without_tokens() -> None:
    with pytest.raises(KeyError, match="input_ids"):
        make_cp_batch_for_te(None, {"seq_lens": torch.tensor([[4]]), "seq_lens_padded": torch.tensor([[4]])})


def test_a_stream_is_cut_like_rows() -> None:
    whole = make_cp_batch_for_te(None, ROWS.batch())
    assert "cu_seqlens_padded" in whole
    as_row = {
        key: value.unsqueeze(0) if key in (*KEYS, "cu_seqlens") else value
        for key, value in whole.items()
        if key != "max_seqlen"
    }
    for stream in (whole, as_row):
        for rank in range(4):
            expected = make_cp_batch_for_te(FakeMesh(4, rank), ROWS.batch())
            result = make_cp_batch_for_te(FakeMesh(4, rank), stream)
            assert result.keys() == expected.keys()
            for key, value in expected.items():
                same = torch.equal(result[key], value) if isinstance(value, Tensor) else result[key] == value
                assert same, key


def stream(ids: list[int], boundaries: list[int], **extra: Any) -> dict[str, Any]:
    return {"input_ids": torch.tensor(ids), "cu_seqlens": torch.tensor(boundaries, dtype=torch.int32), **extra}


def test_padding_of_a_stream_that_tells_only_places() -> None:
    ids = [7, 8, PAD, PAD, PAD, 9, 9, PAD, PAD, PAD, PAD, PAD]
    boundaries = [0, 4, 8, 12]
    with pytest.raises(ConfigError, match=rf"padding_token_id {PAD} is also content \(place 4"):
        make_cp_batch_for_te(None, stream(ids, boundaries), padding_token_id=PAD)
    ids[4] = 5
    expected = [token == PAD for token in ids]
    result = make_cp_batch_for_te(None, stream(ids, boundaries), padding_token_id=PAD)
    assert result["padding_mask"].tolist() == expected
    result = make_cp_batch_for_te(FakeMesh(2, 1), stream(ids, boundaries), padding_token_id=PAD)
    assert result["padding_mask"].tolist() == [expected[place] for place in share_of([4, 4, 4], 2, 1)]
    assert make_cp_batch_for_te(None, stream(ids, boundaries), padding_token_id=1)["padding_mask"].sum() == 0
    labels = torch.full((12,), -100)
    labels[7] = 4
    for key in ("labels", "targets"):
        with pytest.raises(ConfigError, match=r"also content \(place 7"):
            make_cp_batch_for_te(None, stream(ids, boundaries, **{key: labels}), padding_token_id=PAD)


def test_padding_of_a_stream_by_its_mask_or_both_boundaries() -> None:
    mask = torch.tensor([False, True, False, True])
    result = make_cp_batch_for_te(None, stream([PAD, 1, 1, 1], [0, 2, 4], padding_mask=mask), padding_token_id=PAD)
    assert torch.equal(result["padding_mask"], mask)
    padded = torch.tensor([0, 2, 4, FILLER])
    result = make_cp_batch_for_te(None, stream([PAD, 1, 1, 1], [0, 1, 2], cu_seqlens_padded=padded))
    assert torch.equal(result["padding_mask"], mask)


class StandInTE(ModuleType):
    """The documented function of transformer_engine_torch: int32 indices of (boundaries, tokens, ranks, rank)."""

    swapped = False

    def thd_get_partitioned_indices(self, cu_seqlens: Tensor, total: int, size: int, rank: int) -> Tensor:
        assert cu_seqlens.dtype == torch.int32
        assert int(cu_seqlens[-1]) == total
        share = share_of(cu_seqlens.diff().tolist(), size, rank)
        return torch.tensor(share[::-1] if self.swapped else share, dtype=torch.int32)


def test_the_rule_is_compared_with_that_of_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    te = StandInTE("transformer_engine_torch")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", te)
    check_rule_of_te.cache_clear()
    for size in (2, 4):
        for rank in range(size):
            check_rule_of_te(size, rank, torch.device("cpu"))
    te.swapped = True
    check_rule_of_te.cache_clear()
    with pytest.raises(ConfigError, match=r"rank 1 of 2 .*version of Transformer Engine"):
        check_rule_of_te(2, 1, torch.device("cpu"))


def test_without_transformer_engine_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    check_rule_of_te.cache_clear()
    check_rule_of_te(2, 1, torch.device("cpu"))
    check_rule_of_te.cache_clear()
