"""Records -> tokens and loss mask.

A conversation is rendered ONCE, whole, by the checkpoint's own chat template, and the turns of the assistant are found
in that render. Prefixes are never rendered: templates rewrite earlier turns (they drop old reasoning, merge tool
results), so a prefix is not the beginning of the whole.

Supervised is, in each turn of the assistant, everything after what the template itself puts in front of an answer at
generation time, up to and including <|im_end|>: reasoning, text, tool calls. The front is prompt: the template writes
`<|im_start|>assistant\\n` there, and in non-thinking mode `<think></think>` too. A turn without reasoning is a turn in
that mode, so its empty <think></think> is prompt.

Control tokens (<|im_start|> and the like) come from the template alone. The same characters inside a message are text,
with the tokens of text, so a message can neither open nor close a turn.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from automimo.data.records import ChatRecord, Record, TextRecord, strings_of
from automimo.errors import DataError

_START, _END, _END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_HEADER = _START + "assistant\n"
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters: never assigned, so hardly in any text
_BATCH = 256  # records tokenised at once, enough to keep the tokenizer's threads busy


@dataclass(frozen=True, eq=False)
class Example:
    """One document in tokens.

    input_ids: int32 [n]. target_mask: bool [n], True where the token is supervised (predicted from those before it).
    origin: where it comes from. source, weight: number and weight of its source (how often an epoch shows it).
    """

    input_ids: np.ndarray
    target_mask: np.ndarray
    origin: str
    source: int = 0
    weight: float = 1.0

    @property
    def has_target(self) -> bool:
        """Whether anything is supervised but the first token, which nothing predicts."""
        return bool(self.target_mask[1:].any())


class Segment(NamedTuple):
    """A stretch of a render: one control token or plain text, and whether it is supervised."""

    text: str
    control: bool
    supervised: bool


class Renderer:
    """Turns records into examples with one tokenizer and its chat template.

    template_kwargs: variables for the template, for example `{"keep_all_reasoning": False}`.
    Raises DataError when the tokenizer has no <|im_start|>, <|im_end|> or <|endoftext|>, or a template that does not
    write `<|im_start|>assistant\\n` before an answer. A tokenizer without a template renders plain text only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        added = tokenizer.added_tokens_decoder
        self._control = {token.content: index for index, token in added.items() if token.special}
        for text in (_START, _END, _END_OF_TEXT):
            if text not in self._control:
                raise DataError(f"the tokenizer has no control token {text}; is it one of the MiMo-V2 family?")
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        # A copy, because this switch is shared by all users of the tokenizer: control strings are text here.
        self._encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._encoder.encode_special_tokens = True
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._prompts = self._generation_prompts() if tokenizer.chat_template else ()

    def render(self, records: Iterable[Record]) -> Iterator[Example]:
        """Examples of the records, in order. Raises DataError that names the record."""
        remaining = iter(records)
        while batch := list(islice(remaining, _BATCH)):
            yield from self._render_batch(batch)

    def _render_batch(self, records: Sequence[Record]) -> Iterator[Example]:
        documents = [
            [Segment(record.text, False, True), Segment(_END_OF_TEXT, True, True)]
            if isinstance(record, TextRecord)
            else self._chat_segments(record)
            for record in records
        ]
        # Each different text once: system texts and turn headers repeat in every conversation.
        texts = list({text: None for document in documents for text, control, _ in document if not control})
        encodings = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        ids = {text: encoding.ids for text, encoding in zip(texts, encodings, strict=True)}
        for record, document in zip(records, documents, strict=True):
            tokens: list[int] = []
            mask: list[bool] = []
            for segment in document:
                new = [self._control[segment.text]] if segment.control else ids[segment.text]
                tokens += new
                mask += [segment.supervised] * len(new)
            yield Example(np.array(tokens, np.int32), np.array(mask, np.bool_), record.origin)

    def _chat_segments(self, record: ChatRecord) -> list[Segment]:
        if not self._prompts:
            raise DataError(f"{record.origin}: the tokenizer has no chat template, so conversations cannot be rendered")
        mark = self._unused_mark(record)
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in record.messages]
        tools = record.tools
        if mark:
            messages, tools = self._escape(messages, mark), self._escape(tools, mark)
        render = self._apply_template(messages, tools, record.origin, **self.template_kwargs)
        parts = self._control_pattern.split(render)
        if mark:
            # Even places are text, odd ones control tokens.
            parts[::2] = [text.replace(mark, "") for text in parts[::2]]
        weights = [message.get("weight", 1) for message in record.messages if message["role"] == "assistant"]
        segments, roles = self._mark_turns(parts, weights, record.origin)
        expected = _expected_roles(record.messages)
        if roles not in (expected, ["system", *expected]):
            raise DataError(
                f"{record.origin}: the chat template rendered the turns {', '.join(roles) or 'none'}; the messages are "
                f"{', '.join(expected)}. It does not keep the messages apart, so no loss mask can be made"
            )
        return segments

    def _mark_turns(self, parts: list[str], weights: list[int], origin: str) -> tuple[list[Segment], list[str]]:
        """Segments of a render (text and control tokens by turns) and the roles of its turns."""
        segments: list[Segment] = []
        roles: list[str] = []
        remaining = iter(weights)
        is_open = supervised = False
        for i, text in enumerate(parts):
            if i % 2:
                if (text == _START) == is_open and text in (_START, _END):
                    raise DataError(f"{origin}: the chat template rendered a stray {text} after turn {len(roles)}")
                segments.append(Segment(text, True, supervised))
                if text in (_START, _END):
                    is_open, supervised = text == _START, False
            elif i and parts[i - 1] == _START:
                roles.append(text.partition("\n")[0])
                supervised = roles[-1] == "assistant" and next(remaining, 0) == 1
                head = self._prompt_of(text, origin) if roles[-1] == "assistant" else text
                segments += [Segment(head, False, False), Segment(text[len(head) :], False, supervised)]
            else:
                segments.append(Segment(text, False, supervised))
        if is_open:
            raise DataError(f"{origin}: the chat template did not close turn {len(roles)} with {_END}")
        return [segment for segment in segments if segment.text], roles

    def _prompt_of(self, turn: str, origin: str) -> str:
        """The front of a turn of the assistant (after <|im_start|>) that is prompt at generation time."""
        for prompt in self._prompts:
            if turn.startswith(prompt):
                return prompt
        raise DataError(f"{origin}: the chat template began a turn of the assistant with {turn[:40]!r}")

    def _generation_prompts(self) -> tuple[str, ...]:
        """What the template puts after <|im_start|> before an answer, thinking or not; longest first."""
        messages = [{"role": "user", "content": "x"}]
        where = "the chat template of the tokenizer"
        kwargs = self.template_kwargs | {"add_generation_prompt": False}
        conversation = self._apply_template(messages, None, where, **kwargs)
        prompts = {_HEADER.removeprefix(_START)}
        for thinking in (True, False):
            kwargs |= {"add_generation_prompt": True, "enable_thinking": thinking}
            prompt = self._apply_template(messages, None, where, **kwargs).removeprefix(conversation)
            if not prompt.startswith(_HEADER) or self._control_pattern.search(prompt, 1):
                raise DataError(
                    f"{where} puts {prompt[-60:]!r} before an answer; expected {_HEADER!r}. Use a tokenizer of the "
                    "MiMo-V2 family, or mend its chat template"
                )
            prompts.add(prompt.removeprefix(_START))
        return tuple(sorted(prompts, key=len, reverse=True))

    def _apply_template(self, messages: list[dict[str, Any]], tools: Any, where: str, **kwargs: Any) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs))
        except Exception as error:  # a template is a program of its own, and may raise whatever it likes
            raise DataError(f"{where}: the chat template failed: {error}") from error

    def _unused_mark(self, record: ChatRecord) -> str | None:
        """A character to break control strings with, or None where the record holds none."""
        strings = list(strings_of([record.messages, record.tools]))
        if not any(map(self._control_pattern.search, strings)):
            return None
        mark = next((mark for mark in _MARKS if not any(mark in text for text in strings)), None)
        if mark is None:
            raise DataError(f"{record.origin}: holds control strings and every noncharacter U+FDD0 to U+FDEF")
        return mark

    def _escape(self, value: Any, mark: str) -> Any:
        """`value` with `mark` after the first character of each control string, so that the split does not see it."""
        if isinstance(value, str):
            return self._control_pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
        if isinstance(value, dict):
            return {self._escape(key, mark): self._escape(item, mark) for key, item in value.items()}
        return [self._escape(item, mark) for item in value] if isinstance(value, list) else value


def render_chat(
    record: ChatRecord, tokenizer: PreTrainedTokenizerFast, template_kwargs: Mapping[str, Any] | None = None
) -> Example:
    """One conversation as an example. For many records make one `Renderer` and use its `render`."""
    return next(Renderer(tokenizer, template_kwargs).render([record]))


def render_text(record: TextRecord, tokenizer: PreTrainedTokenizerFast) -> Example:
    """A plain document: its tokens and <|endoftext|>, all supervised."""
    return next(Renderer(tokenizer).render([record]))


def _expected_roles(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    roles: list[str] = []
    for message in messages:
        if message["role"] != "tool" or not roles or roles[-1] != "tool":
            roles.append(message["role"])
    return roles
