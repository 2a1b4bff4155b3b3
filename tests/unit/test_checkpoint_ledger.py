"""The ledger books each key once and reports everything that is wrong in one message."""

import pytest

from automimo.checkpoint import Ledger
from automimo.checkpoint.ledger import group_keys
from automimo.errors import CheckpointError


def test_everything_consumed_once_passes() -> None:
    ledger = Ledger({"a": (2, 3), "b": ()})
    assert ledger.consume("b", [])
    assert ledger.consume("a", [2, 3])
    assert (ledger.missing, ledger.unexpected, ledger.doubled, ledger.wrong_shape) == ([], [], [], {})
    ledger.check("folder")


def test_all_faults_in_one_error() -> None:
    ledger = Ledger({"a": (2,), "b": (3,), "c": (4,), "d": (5,)})
    assert ledger.consume("a", (2,))
    assert not ledger.consume("a", (2,))
    assert not ledger.consume("b", (4, 1))
    assert not ledger.consume("x", (1,))
    assert ledger.missing == ["c", "d"]
    assert ledger.unexpected == ["x"]
    assert ledger.doubled == ["a"]
    assert ledger.wrong_shape == {"b": ((4, 1), (3,))}
    with pytest.raises(CheckpointError) as caught:
        ledger.check("some/folder", "Use another preset.")
    assert str(caught.value).splitlines() == [
        "some/folder: the keys do not fit",
        "  2 missing:",
        "    c",
        "    d",
        "  1 unexpected:",
        "    x",
        "  1 given twice:",
        "    a",
        "  1 of the wrong shape:",
        "    b: found [4, 1], expected [3]",
        "Use another preset.",
    ]


def test_hundreds_of_keys_stay_readable() -> None:
    keys = [f"model.layers.{i}.mlp.experts.{e}.{p}.weight" for i in range(1, 7) for e in range(12) for p in "gud"]
    with pytest.raises(CheckpointError) as caught:
        Ledger(dict.fromkeys(keys, (1,))).check("folder")
    lines = str(caught.value).splitlines()
    assert lines[1] == f"  {6 * 12 * 3} missing:"
    assert lines[2:] == [f"    model.layers.{{1..6}}.mlp.experts.{{0..11}}.{p}.weight (72)" for p in "gud"]


def test_many_groups_are_cut_with_a_count() -> None:
    with pytest.raises(CheckpointError, match=r"20 missing(.|\n)*and 12 more groups"):
        Ledger({f"name{chr(97 + i)}": () for i in range(20)}).check("folder")


def test_group_keys_keeps_odd_keys_literal() -> None:
    assert group_keys(["a.{x}.3.b", "a.{x}.3.c", "", "9.w"]) == ["a.{x}.3.b", "a.{x}.3.c", "", "9.w"]
    assert group_keys(["k.1", "k.10", "k.2"]) == ["k.{1..10} (3)"]
    assert group_keys(["k." + "9" * 5000]) == ["k." + "9" * 5000]
    assert group_keys(["a{0}.1", "a{0}.2"]) == ["a{0}.{1..2} (2)"]
