"""The verb `generate`: what is asked of the model, and how the answer grows on the screen."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automimo import answer
from automimo.answer import AnswerStream, run_generate
from automimo.generate import Sampling


def decode(ids: list[int]) -> str:
    """Token ids are bytes here, so that characters are cut in every possible way."""
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text())
def test_the_stream_writes_exactly_the_answer(text: str) -> None:
    out = io.StringIO(newline="")
    stream = AnswerStream(decode, out)
    for byte in text.encode():
        stream.add(byte)
        assert text.startswith(out.getvalue())
    stream.close(text)
    assert out.getvalue() == text + "\n"


def test_a_character_appears_when_its_last_byte_is_there() -> None:
    out = io.StringIO()
    stream = AnswerStream(decode, out)
    seen = []
    for byte in "a中b".encode():
        stream.add(byte)
        seen.append(out.getvalue())
    assert seen == ["a", "a", "a", "a中", "a中b"]


def test_an_answer_that_ends_within_a_character_is_written_as_it_is() -> None:
    out = io.StringIO()
    stream = AnswerStream(decode, out)
    ids = list("a中".encode())[:-1]
    for token in ids:
        stream.add(token)
    stream.close(decode(ids))
    assert out.getvalue() == decode(ids) + "\n"


class FakeChat:
    """Notes what it is asked and answers with the token ids of "ok"."""

    class tokenizer:
        @staticmethod
        def decode(ids: list[int], skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return decode(ids)

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def answer(
        self,
        messages: list[dict[str, str]],
        sampling: Sampling,
        *,
        thinking: bool,
        on_token: Callable[[int, int], None],
    ) -> str:
        self.asked = [messages, sampling, thinking]
        for byte in b"ok":
            on_token(0, byte)
        return "ok"


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("system", [None, "", "Be brief."])
def test_the_question_reaches_the_model(
    system: str | None, thinking: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = FakeChat()
    monkeypatch.setattr(answer, "load_chat", lambda model: chat)
    sampling = Sampling(max_new_tokens=3)
    assert run_generate("m", "Why?", sampling, system=system, thinking=thinking) == 0
    first = [] if system is None else [{"role": "system", "content": system}]
    assert chat.asked == [[*first, {"role": "user", "content": "Why?"}], sampling, thinking]
    assert capsys.readouterr().out == "ok\n"
