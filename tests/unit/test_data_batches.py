"""Batches and the stream: labels per document, resume, epochs, weights, fingerprint, loading."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automimo.data.batches import NO_TARGET, DataStream, collate
from automimo.data.loading import load_examples
from automimo.data.packing import Piece
from automimo.data.render import Example
from automimo.data.sources import SourceSpec
from automimo.errors import DataError
from automimo.mimo_v2_flash.tokenizer import build_tokenizer


def example(ids, mask, origin="e", source=0, weight=1.0):
    return Example(np.array(ids, np.int32), np.array(mask, np.bool_), origin, source, weight)


def documents(lengths, **keys):
    """All tokens supervised and different, so that a token tells where it comes from."""
    starts = np.cumsum([0, *lengths])
    return [
        example(range(start, start + n), [True] * n, f"d{i}", **keys)
        for i, (start, n) in enumerate(zip(starts, lengths, strict=False))
    ]


def test_a_batch_by_hand():
    """The token after a document's last one is another document's; it must never be a target."""
    first = example([5, 6, 7, 8], [False, False, True, True], "a:1")
    second = example([9, 5], [True, True], "a:2")
    batch = collate([first, second], [[Piece(1, 0, 2), Piece(0, 0, 4)], [Piece(1, 0, 2)]])
    assert batch.input_ids.tolist() == [9, 5, 5, 6, 7, 8, 9, 5]
    assert batch.targets.tolist() == [5, -100, -100, 7, 8, -100, 5, -100]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 2, 6, 8]
    assert (batch.valid_targets, batch.tokens, batch.origins) == (4, 8, ("a:2", "a:1", "a:2"))
    dtypes = (batch.input_ids.dtype, batch.targets.dtype, batch.position_ids.dtype, batch.cu_seqlens.dtype)
    assert dtypes == (torch.int64, torch.int64, torch.int64, torch.int32)
    moved = batch.to("cpu")
    assert torch.equal(moved.targets, batch.targets) and moved.origins == batch.origins
    with pytest.raises(ValueError, match="at least one row"):
        collate([first], [])


def test_a_target_at_a_cut_is_kept():
    """Tokens 0..6 cut after 3: the last place of the first piece still predicts token 3."""
    whole = example(range(7), [True, False, True, True, True, True, False])
    batch = collate([whole], [[Piece(0, 0, 3)], [Piece(0, 3, 6)], [Piece(0, 6, 7)]])
    assert batch.targets.tolist() == [-100, 2, 3, 4, 5, -100, -100]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert batch.origins == ("e tokens 0:3", "e tokens 3:6", "e tokens 6:7")


masked_documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=25)


@settings(max_examples=200, deadline=None)
@given(masks=masked_documents, capacity=st.integers(1, 20), packing=st.booleans(), rows=st.integers(1, 5))
def test_every_supervised_token_is_a_target_exactly_once(masks, capacity, packing, rows):
    """Except the first of an example. Against labels made per example by a loop, over a whole epoch of split rows."""
    examples, expected = [], Counter()
    for number, mask in enumerate(masks):
        ids = [number * 100 + i for i in range(len(mask))]
        examples.append(example(ids, mask))
        expected.update((ids[i], ids[i + 1]) for i in range(len(mask) - 1) if mask[i + 1])
    if not expected:
        with pytest.raises(DataError, match="nothing to learn from"):
            DataStream(examples, sequence_length=capacity)
        return
    stream = DataStream(examples, sequence_length=capacity, packing=packing, overflow="split", epochs=1)
    found, tokens = Counter(), Counter()
    for batch in stream.batches(rows):
        targets = batch.targets.tolist()
        found.update((i, t) for i, t in zip(batch.input_ids.tolist(), targets, strict=True) if t != NO_TARGET)
        tokens.update(batch.input_ids.tolist())
        assert batch.valid_targets == sum(t != NO_TARGET for t in targets) > 0
        assert batch.tokens == len(targets) == batch.cu_seqlens[-1]
        for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            assert batch.position_ids[start:stop].tolist() == list(range(stop - start))
    assert found == expected
    assert set(tokens.values()) == {1}


def test_fully_masked_examples_are_never_trained():
    """One without targets, and one whose only supervised token is the first, which nothing predicts."""
    examples = [example([1, 2], [False, False]), example([3, 4], [True, False]), example([5, 6], [False, True])]
    stream = DataStream(examples, sequence_length=8, epochs=1)
    (batch,) = stream.batches(4)
    assert batch.input_ids.tolist() == [5, 6]
    with pytest.raises(DataError, match="none of the 2 examples has a target"):
        DataStream(examples[:2], sequence_length=8)


@pytest.mark.parametrize("weight", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("packing", [True, False])
def test_resume_is_exact_over_epoch_boundaries_twice(packing, weight):
    """ids(0..N) == ids(0..k) + ids(resume..N) at every step of three epochs, and again from the resumed stream."""
    examples = documents([(i * 7) % 11 + 2 for i in range(23)], weight=weight)

    def fresh():
        return DataStream(examples, sequence_length=16, packing=packing, seed=5)

    whole = fresh()
    steps, positions = [], []
    while whole.position["epoch"] < 3:
        positions.append(json.loads(json.dumps(whole.position)))
        steps.append(whole.next_rows(4))
    assert {position["epoch"] for position in positions} == {0, 1, 2}
    for k, position in enumerate(positions):
        resumed = fresh()
        resumed.position = position
        middle = k + (len(steps) - k) // 2
        assert [resumed.next_rows(4) for _ in range(middle - k)] == steps[k:middle]
        again = fresh()
        again.position = resumed.position
        assert [again.next_rows(4) for _ in range(len(steps) - middle)] == steps[middle:]


def test_rows_run_over_epoch_boundaries_without_loss():
    examples = documents([5] * 10)
    stream = DataStream(examples, sequence_length=10, seed=1)
    assert stream.rows_in_epoch(0) == stream.rows_in_epoch(9) == 5
    rows = stream.next_rows(3) + stream.next_rows(3) + stream.next_rows(9)
    assert stream.position == {"epoch": 3, "row": 0}
    assert Counter(piece.example for row in rows for piece in row) == dict.fromkeys(range(10), 3)
    assert rows == [*stream.plan(0).rows, *stream.plan(1).rows, *stream.plan(2).rows]
    # One request may be longer than several epochs.
    other = DataStream(examples, sequence_length=10, seed=1)
    assert other.next_rows(15) == rows


def test_a_finite_stream_ends_with_a_partial_step():
    stream = DataStream(documents([5] * 10), sequence_length=10, seed=1, epochs=2)
    assert stream.total_rows() == 10
    assert [len(stream.next_rows(4)) for _ in range(5)] == [4, 4, 2, 0, 0]
    assert stream.exhausted and stream.position == {"epoch": 2, "row": 0}
    assert DataStream(documents([5]), sequence_length=10).total_rows() is None
    resumed = DataStream(documents([5] * 10), sequence_length=10, seed=1, epochs=3)
    resumed.position = stream.position
    assert len(resumed.next_rows(100)) == 5
    sizes = [len(batch.origins) for batch in DataStream(documents([5] * 5), sequence_length=5, epochs=1).batches(2)]
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize("position", [{"epoch": -1, "row": 0}, {"epoch": 0, "row": 6}, {"epoch": 4, "row": -1}])
def test_positions_that_do_not_exist(position):
    stream = DataStream(documents([5] * 10), sequence_length=10)
    with pytest.raises(DataError, match="does not exist"):
        stream.position = position


@pytest.mark.parametrize(("weight", "per_epoch"), [(1.0, 8), (2.0, 16), (0.5, 4), (1.25, 10), (0.3, 2), (0.01, 1)])
def test_weights_deal_a_whole_number_of_times_and_a_share(weight, per_epoch):
    """round(w * n) per epoch; never does an example get two turns more than another."""
    plain, weighted = documents([3] * 5), documents([4] * 8, source=1, weight=weight)
    stream = DataStream([*plain, *weighted], sequence_length=4, seed=2)
    seen = Counter()
    for epoch in range(12):
        counts = Counter(piece.example for row in stream.plan(epoch).rows for piece in row)
        assert [counts[i] for i in range(5)] == [1] * 5
        assert sum(counts[i] for i in range(5, 13)) == per_epoch
        seen.update(counts)
        total = [seen[i] for i in range(5, 13)]
        assert max(total) - min(total) <= 1


def test_row_counts_with_weights_are_those_of_the_plans():
    examples = documents([(i * 5) % 9 + 2 for i in range(17)], weight=0.7)
    stream = DataStream(examples, sequence_length=12, epochs=6)
    fresh = DataStream(examples, sequence_length=12)
    counts = [len(fresh.plan(epoch).rows) for epoch in range(6)]
    assert [stream.rows_in_epoch(epoch) for epoch in range(6)] == counts
    assert stream.total_rows() == sum(counts) == len(stream.next_rows(10**6))


def test_equal_epochs_have_equal_row_counts():
    """What rows_in_epoch relies on when no source has a fractional weight."""
    examples = documents([(i * 5) % 9 + 2 for i in range(40)])
    stream = DataStream(examples, sequence_length=12, overflow="split")
    assert {len(stream.plan(epoch).rows) for epoch in range(8)} == {stream.rows_in_epoch(5)}


def test_overflow_reaches_the_stream():
    examples = documents([3, 30])
    with pytest.raises(DataError, match=r"\(d1\) has 30 tokens, but data.sequence_length is 8"):
        DataStream(examples, sequence_length=8)
    assert DataStream(examples, sequence_length=8, overflow="drop").plan(0).dropped == 1
    assert DataStream(examples, sequence_length=8, overflow="split").plan(0).split_count == 1
    with pytest.raises(DataError, match="all 1 examples are longer"):
        DataStream(examples[1:], sequence_length=8, overflow="drop")


def test_a_long_prompt_is_cut_off_but_its_answer_is_not():
    prompt_heavy = example(range(30), [False] * 28 + [True, True], "p")
    plan = DataStream([prompt_heavy], sequence_length=9, overflow="split").plan(0)
    assert [row[0] for row in plan.rows] == [Piece(0, 27, 30)]
    assert (plan.idle_pieces, plan.idle_tokens) == (3, 27)
    # A piece whose only target is the first token of the next piece has one.
    border = example(range(12), [False] * 6 + [True] + [False] * 5)
    assert [row[0] for row in DataStream([border], sequence_length=6, overflow="split").plan(0).rows] == [
        Piece(0, 0, 6)
    ]


def test_the_fingerprint_sees_every_change():
    base = {"lengths": [4, 5, 6]}

    def fingerprint(lengths=(4, 5, 6), weight=1.0, source=0, flip=False, **keys):
        examples = documents(lengths, weight=weight, source=source)
        if flip:
            mask = examples[1].target_mask.copy()
            mask[2] = False
            examples[1] = Example(examples[1].input_ids, mask, "d1", source, weight)
        settings = {"sequence_length": 16, "packing": True, "overflow": "split", "seed": 0} | keys
        return DataStream(examples, **settings).fingerprint()

    assert fingerprint() == fingerprint(**base)
    changed = [
        fingerprint(lengths=(4, 6, 5)), fingerprint(lengths=(4, 5)), fingerprint(weight=2.0), fingerprint(flip=True),
        fingerprint(source=1), fingerprint(sequence_length=17), fingerprint(packing=False), fingerprint(seed=1),
        fingerprint(overflow="drop"),
    ]  # fmt: skip
    assert len({fingerprint(), *changed}) == len(changed) + 1


# Loading


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["Explain it. The answer is that it's fine."] * 3, 300)


def chat(answer, **keys):
    return {"messages": [{"role": "user", "content": "Explain it."}, {"role": "assistant", "content": answer, **keys}]}


def test_load_examples_reports_what_it_did(tmp_path, tokenizer):
    chats, texts = tmp_path / "c.jsonl", tmp_path / "t.jsonl"
    chats.write_text("\n".join(json.dumps(row) for row in (chat("fine"), chat("not this", weight=0), chat("is"))))
    texts.write_text(json.dumps({"text": "The answer"}))
    calls = []
    examples, report = load_examples(
        [SourceSpec("chat", str(chats)), SourceSpec("text", str(texts), weight=2.0)],
        tokenizer,
        progress=lambda *call: calls.append(call),
    )
    assert [e.origin for e in examples] == [f"{chats}:1", f"{chats}:3", f"{texts}:1"]
    assert [(e.source, e.weight) for e in examples] == [(0, 1.0), (0, 1.0), (1, 2.0)]
    first, second = report.sources
    assert (first.records, first.examples, first.fully_masked) == (3, 2, 1)
    assert first.tokens == sum(len(e.input_ids) for e in examples[:2])
    assert first.supervised_tokens == sum(len(tokenizer(text).input_ids) for text in ("fine<|im_end|>", "is<|im_end|>"))
    assert second.supervised_tokens == len(tokenizer("The answer").input_ids)  # first token out, <|endoftext|> in
    assert (report.records, report.examples, report.fully_masked) == (4, 3, 1)
    assert report.tokens == first.tokens + second.tokens
    assert first.longest == max(len(e.input_ids) for e in examples[:2])
    assert calls == [(first.name, 3, 3), (second.name, 1, 1)]


def test_load_examples_passes_template_variables(tmp_path, tokenizer):
    path = tmp_path / "c.jsonl"
    messages = chat("a", reasoning_content="because")["messages"] + chat("b")["messages"]
    path.write_text(json.dumps({"messages": messages}))
    keep, _ = load_examples([SourceSpec("chat", str(path))], tokenizer)
    lose, _ = load_examples([SourceSpec("chat", str(path))], tokenizer, template_kwargs={"keep_all_reasoning": False})
    assert "because" in tokenizer.decode(keep[0].input_ids.tolist())
    assert "because" not in tokenizer.decode(lose[0].input_ids.tolist())


def test_load_examples_refuses_a_source_without_targets(tmp_path, tokenizer):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(chat("x", weight=0)))
    with pytest.raises(DataError, match=r"all of its 1 records are fully masked .*c\.jsonl:1"):
        load_examples([SourceSpec("chat", str(path))], tokenizer)
    with pytest.raises(DataError, match="no data sources"):
        load_examples([], tokenizer)


def test_python_docs_from_source_to_batch(tokenizer):
    held_out, report = load_examples([SourceSpec("python_docs")], tokenizer, part="validation")
    assert 100 < report.examples == report.records < 1000
    stream = DataStream(held_out, sequence_length=512, overflow="split", epochs=1)
    assert stream.plan(0).efficiency > 0.95
    assert sum(batch.valid_targets for batch in stream.batches(8)) == report.supervised_tokens
