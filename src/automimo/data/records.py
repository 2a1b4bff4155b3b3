"""One JSON object of a data set -> a checked record. Every refusal says what is wrong and what was expected."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from automimo.errors import DataError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ChatRecord:
    """A conversation, ready for a chat template.

    messages: dicts with `role` and `content` (a string) and, on assistant messages where given, `reasoning_content`
    (a string), `tool_calls` (a list of `{"type": "function", "function": {"name", "arguments"}}`, arguments a dict)
    and `weight` (0 = context only, not learnt from; 1).
    tools: function descriptions (JSON schema), or None.
    origin: where the record comes from, for people: `chats.jsonl:12`.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    origin: str


@dataclass(frozen=True)
class TextRecord:
    """A plain document. origin: where it comes from, for people."""

    text: str
    origin: str


Record = ChatRecord | TextRecord


def parse_json_line(line: bytes) -> dict[str, Any]:
    """One line of a JSONL file, UTF-8. Raises DataError."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start + 1} of the line is not UTF-8") from error
    except ValueError as error:
        raise DataError(f"not valid JSON ({error}); expected one JSON object per line") from error
    except RecursionError as error:
        raise DataError("the JSON is nested too deeply") from error
    if not isinstance(value, dict):
        raise DataError(f"the line is {_kind(value)}; expected a JSON object")
    return value


def text_record(value: dict[str, Any], origin: str) -> TextRecord:
    """Check a `{"text": ...}` object; other keys are ignored. Raises DataError."""
    if value.get("text") is None:
        raise DataError(f'no "text" (keys: {_keys(value)}); expected {{"text": "..."}}')
    text = _string(value["text"], "text")
    if not text:
        raise DataError('"text" is empty')
    return TextRecord(text, origin)


def chat_record(value: dict[str, Any], origin: str) -> ChatRecord:
    """Check a `{"messages": [...], "tools": [...]}` object; other keys are ignored. Raises DataError.

    Accepts content as a list of text parts (joined), null for absent keys, tool-call arguments and `tools` as JSON
    text, `reasoning` for `reasoning_content`.
    """
    messages = value.get("messages")
    if messages is None:
        raise DataError(f'no "messages" (keys: {_keys(value)}); expected {{"messages": [{{"role", "content"}}, ...]}}')
    if not isinstance(messages, list) or not messages:
        raise DataError(f'"messages" is {"an empty list" if messages == [] else _kind(messages)}; expected a list')
    checked = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for i, message in enumerate(checked[1:], start=1):
        if message["role"] == "system":
            raise DataError(f"messages[{i}] has role system; expected it only as the first message")
    if not any(message["role"] == "assistant" for message in checked):
        raise DataError("no assistant message; expected at least one, nothing else is learnt from")
    return ChatRecord(checked, _tools(value.get("tools")), origin)


def strings_of(value: Any) -> Iterator[str]:
    """All strings inside a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_of(item)


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DataError(f"{where} is {_kind(message)}; expected an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{where} has role {role!r}; expected one of {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if role != "assistant":
        for key in ("tool_calls", "reasoning_content"):
            if message.get(key):
                raise DataError(f"{where} has role {role} and {key}; expected it on assistant messages only")
        return {"role": role, "content": _content(message.get("content"), f"{where}.content")}

    reasoning = message.get("reasoning_content", message.get("reasoning"))
    checked: dict[str, Any] = {"role": role}
    if message.get("content") is None and (calls or reasoning):
        checked["content"] = ""
    else:
        checked["content"] = _content(message.get("content"), f"{where}.content")
    if reasoning is not None:
        checked["reasoning_content"] = _string(reasoning, f"{where}.reasoning_content")
    if calls:
        if not isinstance(calls, list):
            raise DataError(f"{where}.tool_calls is {_kind(calls)}; expected a list")
        checked["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    weight = message.get("weight")
    if weight is not None:
        if weight not in (0, 1):
            raise DataError(f"{where}.weight is {weight!r}; expected 0 (do not learn from this message) or 1")
        checked["weight"] = int(weight)
    return checked


def _content(content: Any, where: str) -> str:
    if not isinstance(content, list):
        return _string(content, where)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "text":
            texts.append(_string(part.get("text"), f"{where}[{i}].text"))
        else:
            kind = f"a part of type {part.get('type')!r}" if isinstance(part, dict) else _kind(part)
            raise DataError(f'{where}[{i}] is {kind}; expected only parts {{"type": "text", "text": "..."}}')
    return "".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f'{where}: expected {{"function": {{"name": "...", "arguments": {{...}}}}}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json_text(arguments, f"{where}.arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise DataError(f"{where}.arguments is {_kind(arguments)}; expected an object, or one as JSON text")
    _check_strings(function["name"], where)
    _check_strings(arguments, f"{where}.arguments")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        tools = _json_text(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise DataError(f'"tools" is {_kind(tools)}; expected a list of function descriptions')
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f'tools[{i}]: expected {{"type": "function", "function": {{"name": "...", ...}}}}')
    _check_strings(tools, "tools")
    return tools


def _json_text(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is text, but not valid JSON ({error})") from error


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} is {_kind(value)}; expected a string")
    _check_strings(value, where)
    return value


def _check_strings(value: Any, where: str) -> None:
    """JSON can spell half of a surrogate pair, which no tokenizer takes."""
    for text in strings_of(value):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{where} holds half a surrogate pair ({text[error.start]!r}); expected text") from error


def _kind(value: Any) -> str:
    kinds = ((type(None), "null"), (bool, "a boolean"), (str, "a string"), (list, "a list"), (dict, "an object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "a number")


def _keys(value: dict[str, Any]) -> str:
    return ", ".join(list(value)[:8]) or "none"
