"""The verb `generate`: one question, the answer shown as it is made."""

import sys
from collections.abc import Callable
from typing import TextIO

from automimo.generate import Sampling, load_chat


class AnswerStream:
    """Writes the text of token ids as it becomes certain.

    A byte-level token may end in the middle of a character; `decode` then shows U+FFFD for it, and text from there on
    waits for the next token.
    """

    def __init__(self, decode: Callable[[list[int]], str], out: TextIO) -> None:
        self._decode, self._out = decode, out
        self._ids: list[int] = []
        self._written = ""

    def add(self, token: int) -> None:
        """One more token."""
        self._ids.append(token)
        self._write(self._decode(self._ids).rstrip("\N{REPLACEMENT CHARACTER}"))

    def close(self, answer: str) -> None:
        """The rest of the whole `answer`, and a newline."""
        self._write(answer)
        self._out.write("\n")
        self._out.flush()

    def _write(self, text: str) -> None:
        if text.startswith(self._written):
            self._out.write(text[len(self._written) :])
            self._out.flush()
            self._written = text


def run_generate(model: str, prompt: str, sampling: Sampling, *, system: str | None, thinking: bool) -> int:
    """Load `model`, answer `prompt`, and write the answer to stdout while it grows."""
    chat = load_chat(model)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    stream = AnswerStream(lambda ids: str(chat.tokenizer.decode(ids, skip_special_tokens=True)), sys.stdout)
    answer = chat.answer(messages, sampling, thinking=thinking, on_token=lambda _, token: stream.add(token))
    stream.close(answer)
    return 0
