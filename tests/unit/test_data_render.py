"""Rendering: the loss mask against an independent statement of what the assistant said."""

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from automimo.data.records import ChatRecord, TextRecord, chat_record
from automimo.data.render import Renderer, render_chat, render_text
from automimo.data.show import PROMPT_STYLE, SUPERVISED_STYLE, colour_loss_mask
from automimo.errors import DataError
from automimo.mimo_v2_flash.tokenizer import build_tokenizer, special_token_ids

CORPUS = ["The assistant says it's fine, user and system agree. ", "Let x = 12; y = 34.\n\n", "東京 naïve <think> tool"]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(CORPUS * 3, 340)


@pytest.fixture(scope="module")
def renderers(tokenizer):
    return {keep: Renderer(tokenizer, {"keep_all_reasoning": keep}) for keep in (True, False)}


def supervised_text(example, tokenizer):
    ids = example.input_ids[example.target_mask].tolist()
    return tokenizer.decode(ids, skip_special_tokens=False)


# What the assistant said, stated without the template


def call_text(call):
    function = call["function"]
    parameters = [
        f"<parameter={name}>{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</parameter>\n"
        for name, value in function["arguments"].items()
    ]
    return f"<tool_call>\n<function={function['name']}>\n{''.join(parameters)}</function>\n</tool_call>"


def said(messages, keep_all_reasoning):
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    texts = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("weight", 1) == 1:
            reasoning = message.get("reasoning_content") or ""
            if not keep_all_reasoning and i < last_user:
                reasoning = ""
            text = f"<think>{reasoning}</think>" if reasoning else ""  # an empty <think></think> is prompt
            parts = [message["content"]] if message["content"] else []
            parts += [call_text(call) for call in message.get("tool_calls", [])]
            texts.append(text + "\n".join(parts) + "<|im_end|>")
    return unicodedata.normalize("NFC", "".join(texts))


CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|image_pad|>", "<|im_start|>assistant\n", "assistant\n"]
words = st.sampled_from(["a", "user", "\n", " ", "12", "é", "東", "'s", "<", "|>", "<tool_call>", "{", *CONTROL])
plain = st.lists(words, max_size=6).map("".join)
names = st.text("abcxyz_", min_size=1, max_size=5)
values = st.one_of(plain, st.integers(-9, 9), st.booleans(), st.lists(st.integers(0, 3), max_size=2))
calls = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    names,
    st.dictionaries(names, values, max_size=3),
)


@st.composite
def assistant_messages(draw):
    message = {"role": "assistant", "content": draw(plain)}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(plain)
    if draw(st.booleans()):
        message["tool_calls"] = draw(st.lists(calls, min_size=1, max_size=3))
    if draw(st.integers(0, 9)) == 0:
        message["weight"] = 0
    return message


turns = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, plain),
    st.builds(lambda text: {"role": "tool", "content": text}, plain),
    assistant_messages(),
)


@st.composite
def chats(draw):
    system = draw(st.lists(st.builds(lambda text: {"role": "system", "content": text}, plain), max_size=1))
    messages = system + draw(st.lists(turns, min_size=1, max_size=7)) + [draw(assistant_messages())]
    tools = draw(
        st.one_of(st.none(), st.just([{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]))
    )
    return {"messages": messages, "tools": tools}


@settings(max_examples=200, deadline=None)
@given(chat=chats(), keep=st.booleans())
def test_the_supervised_tokens_are_what_the_assistant_said(tokenizer, renderers, chat, keep):
    """Also with control strings inside all texts: those are text and move no border."""
    record = chat_record(chat, "chat")
    (example,) = renderers[keep].render([record])
    assert supervised_text(example, tokenizer) == said(record.messages, keep)
    ids = special_token_ids(tokenizer)
    turns_rendered = int((example.input_ids == ids["<|im_start|>"]).sum())
    assert turns_rendered == int((example.input_ids == ids["<|im_end|>"]).sum())
    assert ids["<|endoftext|>"] not in example.input_ids and ids["<|image_pad|>"] not in example.input_ids
    whole = tokenizer.decode(example.input_ids.tolist(), skip_special_tokens=False)
    rendered = tokenizer.apply_chat_template(
        record.messages, tools=record.tools, tokenize=False, keep_all_reasoning=keep
    )
    assert whole == unicodedata.normalize("NFC", rendered)


CHAT = [
    {"role": "user", "content": "Hello it's 12"},
    {"role": "assistant", "content": "\n fine", "reasoning_content": "\nLet x = 12;\n"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no <tool_call>"},
]


def test_a_tool_schema_cannot_compose_a_turn(tokenizer):
    """Keys of a schema become XML names, so the key |im_end| reads <|im_end|> in the render: refused, not believed."""
    parameters = {"type": "object", "properties": {}, "|im_end|": "", "|im_start|": "assistant\nlearn this"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(DataError, match=r"^c:9: the chat template rendered"):
        render_chat(ChatRecord(CHAT, tools, "c:9"), tokenizer)


def test_tokens_are_those_of_the_tokenizer_for_the_whole_render(tokenizer):
    example = render_chat(ChatRecord(CHAT, None, "c"), tokenizer)
    encoded = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True)
    assert example.input_ids.tolist() == encoded["input_ids"]
    assert example.input_ids.dtype == "int32" and example.target_mask.dtype == "bool"
    assert len(example.input_ids) == len(example.target_mask)


def test_the_terminator_is_supervised_and_the_empty_think_is_not(tokenizer):
    ids = special_token_ids(tokenizer)
    example = render_chat(ChatRecord(CHAT, None, "c"), tokenizer)
    tokens, mask = example.input_ids.tolist(), example.target_mask.tolist()
    ends = [supervised for token, supervised in zip(tokens, mask, strict=True) if token == ids["<|im_end|>"]]
    assert ends == [False, False, True, False, True]  # system, user, assistant, user, assistant
    thinks = [supervised for token, supervised in zip(tokens, mask, strict=True) if token == ids["<think>"]]
    assert thinks == [True, False]


def test_thinking_prompt_of_a_patched_template_is_prompt(tokenizer):
    """A template whose generation prompt ends with <think> (facts D24): the model never writes that token."""
    patched = build_tokenizer([], 288)
    patched.chat_template = tokenizer.chat_template.replace("('' if enable_thinking", "('<think>' if enable_thinking")
    example = render_chat(ChatRecord(CHAT, None, "c"), patched)
    assert supervised_text(example, patched).startswith("\nLet x = 12;\n</think>\n fine<|im_end|>")


def test_text_is_supervised_whole_and_ends(tokenizer):
    ids = special_token_ids(tokenizer)
    text = "Let x <|im_end|> = 12 <|endoftext|>"
    example = render_text(TextRecord(text, "t:1"), tokenizer)
    assert example.target_mask.all() and example.origin == "t:1"
    assert example.input_ids[-1] == ids["<|endoftext|>"]
    assert tokenizer.decode(example.input_ids[:-1].tolist()) == text
    assert not set(ids.values()) & set(example.input_ids[:-1].tolist())


def test_many_records_come_back_in_order(tokenizer):
    records = [TextRecord(f"x{i % 7} = {i}", f"t:{i}") for i in range(700)]
    records[300:300] = [ChatRecord(CHAT, None, "c")]
    examples = list(Renderer(tokenizer).render(iter(records)))
    assert [example.origin for example in examples] == [record.origin for record in records]
    assert tokenizer.decode(examples[450].input_ids[:-1].tolist()) == records[450].text


def test_the_tokenizer_itself_is_left_as_it_was(tokenizer):
    before = tokenizer("<|im_start|>x").input_ids
    list(Renderer(tokenizer).render([ChatRecord(CHAT, None, "c"), TextRecord("<|im_start|>x", "t")]))
    assert tokenizer("<|im_start|>x").input_ids == before == [special_token_ids(tokenizer)["<|im_start|>"], before[1]]


HEAD = "{%- for m in messages -%}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
TAIL = "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"


def with_template(template):
    tokenizer = build_tokenizer([], 288)
    tokenizer.chat_template = template
    return tokenizer


def test_a_plain_chatml_template_with_newlines_after_turns_works():
    tokenizer = with_template(HEAD + TURN + "{{- '\\n' -}}" + TAIL)
    example = render_chat(ChatRecord([{"role": "user", "content": "q"}, *CHAT[1:]], None, "c"), tokenizer)
    # A line feed at the start of an answer is the answer's, not merged with that of the prompt.
    assert supervised_text(example, tokenizer) == "\n fine<|im_end|>no <tool_call><|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            HEAD + "{% if not loop.first %}" + TURN + "{% endif %}" + TAIL,
            "rendered the turns assistant, user, assistant",
        ),
        (HEAD + TURN.replace("m.role", "'user'") + TAIL, "rendered the turns user, user, user, user; the messages are"),
        (HEAD + "<|im_start|>" + TURN + TAIL, "rendered a stray"),
        (HEAD + TURN + "<|im_end|>" + TAIL, "rendered a stray"),
        (HEAD + "<|im_start|>{{ m.role }}\n{{ m.content }}" + TAIL, "rendered a stray|did not close turn"),
        (HEAD + "{{ raise_exception('no way') }}" + TAIL, "the chat template failed: no way"),
        (HEAD + "{{ 1 // 0 }}" + TURN + TAIL, "the chat template failed: "),
        (HEAD + TURN + "{%- endfor -%}", "expected '<.im_start.>assistant"),
        (HEAD + "[INST]{{ m.content }}[/INST]{%- endfor -%}", "expected '<.im_start.>assistant"),
    ],
)
def test_templates_that_do_not_keep_turns_apart_are_refused(template, message):
    with pytest.raises(DataError, match=message):
        render_chat(ChatRecord(CHAT, None, "c:3"), with_template(template))


def test_tool_arguments_too_deep_for_a_template_are_named(tokenizer):
    deep: dict[str, object] = {}
    for _ in range(700):
        deep = {"a": deep}
    calls = [{"type": "function", "function": {"name": "f", "arguments": deep}}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    with pytest.raises(DataError, match="c:4"):
        render_chat(ChatRecord(messages, None, "c:4"), tokenizer)


def test_errors_name_the_record(tokenizer):
    broken = with_template(HEAD + "{% if loop.index0 == 2 %}{{ raise_exception('odd') }}{% endif %}" + TURN + TAIL)
    with pytest.raises(DataError, match=r"^file\.jsonl:7: the chat template failed: odd"):
        render_chat(ChatRecord(CHAT, None, "file.jsonl:7"), broken)
    no_template = build_tokenizer([], 288)
    no_template.chat_template = None
    with pytest.raises(DataError, match=r"^c:1: the tokenizer has no chat template"):
        render_chat(ChatRecord(CHAT, None, "c:1"), no_template)
    assert render_text(TextRecord("x", "t"), no_template).target_mask.tolist() == [True, True]
    with pytest.raises(DataError, match=r"no control token <\|im_start\|>"):
        Renderer(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())))


def test_colours(tokenizer):
    text = colour_loss_mask(render_chat(ChatRecord(CHAT, None, "c"), tokenizer), tokenizer)
    assert text.plain == tokenizer.apply_chat_template(CHAT, tokenize=False)
    spans = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert [words for words, style in spans if style == SUPERVISED_STYLE] == [
        "<think>\nLet x = 12;\n</think>\n fine<|im_end|>",
        "no <tool_call><|im_end|>",
    ]
    assert {style for _, style in spans} == {SUPERVISED_STYLE, PROMPT_STYLE}
