"""Sources: what is accepted, what is refused and with which words, Hugging Face data sets, python_docs."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from automimo.data.python_docs import _documentation, python_docs_records
from automimo.data.records import ChatRecord, TextRecord, chat_record, text_record
from automimo.data.sources import SourceSpec, read_source, source_name
from automimo.errors import ConfigError, DataError

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def write_jsonl(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def chat_with(*messages, **keys):
    return {"messages": [{"role": "user", "content": "q"}, *messages], **keys}


def test_chat_file(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    path = write_jsonl(
        tmp_path / "chats.jsonl",
        CHAT | {"id": 7},
        "",
        chat_with(
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call], "name": None},
            {"role": "tool", "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "k"}]},
            {"role": "assistant", "content": "a", "tool_calls": None, "reasoning_content": None, "weight": 0},
            tools=tools,
        ),
        chat_with({"role": "assistant", "content": "a", "reasoning": "r"}, tools=json.dumps(tools)),
    )
    records = read_source(SourceSpec("chat", path))
    assert [record.origin for record in records] == [f"{path}:1", f"{path}:3", f"{path}:4"]
    assert records[0] == ChatRecord(CHAT["messages"], None, f"{path}:1")
    parsed = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert records[1].messages[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [parsed]},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "a", "weight": 0},
    ]
    assert records[1].tools == records[2].tools == tools
    assert records[2].messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "r"}


def test_text_file_with_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two\\n", "url": 1}')
    assert read_source(SourceSpec("text", str(path))) == [
        TextRecord("one", f"{path}:1"),
        TextRecord("two\n", f"{path}:3"),
    ]


BAD_CHATS = [
    ('{"messages": [', r"not valid JSON .*expected one JSON object per line"),
    ("[1]", "the line is a list; expected a JSON object"),
    ({"conversation": 1, "id": 2}, r'no "messages" \(keys: conversation, id\)'),
    ({"messages": []}, '"messages" is an empty list'),
    ({"messages": {"role": "user"}}, '"messages" is an object; expected a list'),
    ({"messages": ["hi"]}, r"messages\[0\] is a string; expected an object with role and content"),
    (chat_with({"role": "bot", "content": "a"}), r"messages\[1\] has role 'bot'; expected one of system, user"),
    (chat_with({"content": "a"}), r"messages\[1\] has role None"),
    (chat_with({"role": "assistant", "content": 5}), r"messages\[1\]\.content is a number; expected a string"),
    (chat_with({"role": "assistant"}), r"messages\[1\]\.content is null; expected a string"),
    (chat_with({"role": "assistant", "content": [{"type": "image"}]}), r"content\[0\] is a part of type 'image'"),
    (chat_with({"role": "assistant", "content": ["x"]}), r"content\[0\] is a string; expected only parts"),
    (chat_with({"role": "user", "content": "a"}), "no assistant message; expected at least one"),
    (chat_with({"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}), "only as the first"),
    (chat_with({"role": "assistant", "content": "a", "reasoning_content": []}), "reasoning_content is a list"),
    (chat_with({"role": "assistant", "content": "a", "tool_calls": {}, "weight": 2}), "weight is 2; expected 0"),
    (chat_with({"role": "assistant", "content": "a", "tool_calls": "f()"}), "tool_calls is a string; expected a list"),
    (chat_with({"role": "assistant", "tool_calls": [{"function": {}}]}), r'tool_calls\[0\]: expected \{"function"'),
    (
        chat_with({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}),
        r"arguments is text, but not valid JSON",
    ),
    (
        chat_with({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}),
        r"arguments is a list; expected an object",
    ),
    (CHAT | {"tools": [1]}, r'tools\[0\]: expected \{"type": "function"'),
    (CHAT | {"tools": {"f": 1}}, '"tools" is an object; expected a list'),
    ({"messages": [{"role": "user", "content": "q", "tool_calls": [1]}]}, "expected it on assistant messages only"),
    ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "half a surrogate pair"),
]


@pytest.mark.parametrize(("row", "message"), BAD_CHATS)
def test_a_bad_chat_is_named_by_file_and_line(tmp_path, row, message):
    path = write_jsonl(tmp_path / "c.jsonl", CHAT, row)
    with pytest.raises(DataError, match=message) as caught:
        read_source(SourceSpec("chat", path))
    assert str(caught.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"content": "x"}, r'no "text" \(keys: content\); expected \{"text": "..."\}'),
        ({"text": None}, 'no "text"'),
        ({"text": ["x"]}, "text is a list; expected a string"),
        ({"text": ""}, '"text" is empty'),
        ("null", "the line is null; expected a JSON object"),
    ],
)
def test_a_bad_text_is_named_by_file_and_line(tmp_path, row, message):
    path = write_jsonl(tmp_path / "t.jsonl", {"text": "x"}, "", row)
    with pytest.raises(DataError, match=message) as caught:
        read_source(SourceSpec("text", path))
    assert str(caught.value).startswith(f"{path}:3: ")


def test_all_bad_lines_are_counted_and_the_first_five_shown(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", *[{"text": "x"}, {"no": 1}] * 8)
    with pytest.raises(DataError) as caught:
        read_source(SourceSpec("text", path))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"8 of 16 records of {path} cannot be used:"
    assert [line.split(": ")[0].strip() for line in lines[1:6]] == [f"{path}:{n}" for n in (2, 4, 6, 8, 10)]
    assert lines[6:] == ["  ... and 3 more"]


def test_a_line_that_is_not_utf8(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r":1: byte 11 of the line is not UTF-8"):
        read_source(SourceSpec("text", str(path)))


def test_files_that_are_empty_missing_or_folders(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="holds no records"):
        read_source(SourceSpec("text", str(tmp_path / "empty.jsonl")))
    with pytest.raises(DataError, match="no such file"):
        read_source(SourceSpec("chat", str(tmp_path / "none.jsonl")))
    with pytest.raises(DataError, match="is a folder"):
        read_source(SourceSpec("chat", str(tmp_path)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "csv", "path": "x"}, "kind is 'csv'; expected one of chat, text, hf, python_docs"),
        ({"kind": "chat"}, "path is missing"),
        ({"kind": "python_docs", "path": "x"}, "takes none"),
        ({"kind": "python_docs", "split": "test"}, "train and validation"),
        ({"kind": "text", "path": "x", "weight": 0.0}, "weight is 0.0"),
        ({"kind": "text", "path": "x", "weight": float("nan")}, "weight is nan"),
        ({"kind": "text", "path": "x", "split": "train"}, "no splits"),
        ({"kind": "text", "path": "x", "subset": "a"}, "subset and revision"),
    ],
)
def test_specs_that_contradict_themselves(fields, message):
    with pytest.raises(ConfigError, match=message):
        SourceSpec(**fields)


def test_names_for_reports():
    assert source_name(SourceSpec("chat", "a.jsonl")) == "chat a.jsonl"
    assert source_name(SourceSpec("hf", "me/set", split="test")) == "hf me/set [test]"
    assert source_name(SourceSpec("python_docs")) == "python_docs"


def test_reading_a_recipe_needs_no_torch():
    code = (
        "import sys, automimo.data, automimo.data.sources\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "[]"


def test_the_examples_of_the_manual_load():
    manual = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", manual, re.DOTALL)]
    chats = [chat_record(block, "manual") for block in blocks if "messages" in block]
    texts = [text_record(block, "manual") for block in blocks if "text" in block]
    assert (len(blocks), len(chats), len(texts)) == (3, 2, 1)
    assert chats[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    recipe = YAML(typ="safe").load(re.search(r"```yaml\n(.*?)```", manual, re.DOTALL)[1])
    specs = [SourceSpec(**source) for part in ("train", "validation") for source in recipe["data"][part]]
    assert [spec.weight for spec in specs] == [1.0, 0.5, 1.0]


# Hugging Face data sets


@pytest.fixture
def hf_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_hf_files_of_every_kind_give_the_records_of_the_file(tmp_path, hf_cache):
    import datasets

    rows = [{"text": f"document {i}"} for i in range(5)]
    data = datasets.Dataset.from_list(rows)
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "a.jsonl", *rows)
    write_jsonl(tmp_path / "folder" / "train.jsonl", *rows)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "disk")
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "both")
    arrow = next((tmp_path / "disk").glob("*.arrow"))
    for name in ("a.jsonl", "a.parquet", "folder", "disk", "both", str(arrow)):
        records = read_source(SourceSpec("hf", str(tmp_path / name)))
        assert [record.text for record in records] == [row["text"] for row in rows], name
        assert records[2].origin == f"{tmp_path / name}[train][2]"
    test = read_source(SourceSpec("hf", str(tmp_path / "both"), split="test"))
    assert [record.text for record in test] == ["document 1"]
    # A set of one split needs no name; one of several has no `validation` here.
    assert len(read_source(SourceSpec("hf", str(tmp_path / "a.jsonl")), "validation")) == 5
    with pytest.raises(DataError, match=r"no split 'validation'; it has train, test"):
        read_source(SourceSpec("hf", str(tmp_path / "both")), "validation")


def test_hf_chats_lose_the_nulls_that_arrow_adds(tmp_path, hf_cache):
    def call(name, arguments):
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        }

    rows = [chat_with(call("f", {"x": "1"})), chat_with(call("g", {"y": "2"}), {"role": "tool", "content": "t"}), CHAT]
    chats = write_jsonl(tmp_path / "chats.jsonl", *rows)
    through_arrow = read_source(SourceSpec("hf", chats))
    plain = read_source(SourceSpec("chat", chats))
    assert [record.messages for record in through_arrow] == [record.messages for record in plain]


def test_hf_errors(tmp_path, hf_cache):
    for path in ("./nowhere", str(tmp_path / "none.parquet")):
        with pytest.raises(DataError, match="no such file or folder"):
            read_source(SourceSpec("hf", path))
    write_jsonl(tmp_path / "a.jsonl", {"prompt": "x", "label": 1})
    with pytest.raises(DataError, match=r"expected a column messages or text; it has prompt, label"):
        read_source(SourceSpec("hf", str(tmp_path / "a.jsonl")))
    (tmp_path / "a.csv").write_text("text\nx\n")
    with pytest.raises(DataError, match=r"expected a file that ends in \.json"):
        read_source(SourceSpec("hf", str(tmp_path / "a.csv")))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1nothing")
    with pytest.raises(DataError, match="cannot be opened"):
        read_source(SourceSpec("hf", str(tmp_path / "broken.parquet")))
    write_jsonl(tmp_path / "b.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(DataError, match=r"b\.jsonl\[train\]\[0\]: no assistant message"):
        read_source(SourceSpec("hf", str(tmp_path / "b.jsonl")))


# python_docs


LONG = "A sentence that is long enough to be worth a question, and then some more words."


@pytest.fixture
def library(tmp_path):
    """A standard library in small, with everything that must be left out."""
    files = {
        "pydoc_data/topics.py": f"topics = {{'with': 'The with statement. {LONG}\\n', 'if': 'short'}}",
        "alpha.py": f'"""Alpha. {LONG}"""\nraise SystemExit("imported!")\n',
        "package/__init__.py": f'"""Package. {LONG}"""\n',
        "package/part.py": (
            f'class Thing:\n    """Thing. {LONG}"""\n'
            f'    def act(self):\n        """Act. {LONG}\n\n            indented\n        end\n        """\n'
            f'    def _hidden(self):\n        """Hidden. {LONG}"""\n'
            f'async def wait():\n    """Wait. {LONG}"""\n    def inner():\n        """Inner. {LONG}"""\n'
        ),
        "beta.py": f'def twin():\n    """Act. {LONG}\n\n        indented\n    end\n    """\n',
        "_private.py": f'"""Private. {LONG}"""\n',
        "test/test_alpha.py": f'"""Test. {LONG}"""\n',
        "site-packages/other.py": f'"""Other. {LONG}"""\n',
        "idlelib/run.py": f'"""Idle. {LONG}"""\n',
    }
    for name, text in files.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "lib"


def test_python_docs_reads_topics_and_docstrings_and_nothing_else(library):
    texts = _documentation(library)
    assert texts == {
        "with": f"The with statement. {LONG}",
        "alpha": f"Alpha. {LONG}",
        "package": f"Package. {LONG}",
        "package.part.Thing": f"Thing. {LONG}",
        "beta.twin": f"Act. {LONG}\n\n    indented\nend",  # package.part.Thing.act has the same text and a later name
        "package.part.wait": f"Wait. {LONG}",
    }


def test_python_docs_without_a_library(tmp_path):
    with pytest.raises(DataError, match="install its full standard library"):
        _documentation(tmp_path)


def test_python_docs_of_this_python():
    train, held_out = list(python_docs_records("train")), list(python_docs_records("validation"))
    assert 2000 < len(train) < 20000
    assert 0.03 < len(held_out) / (len(train) + len(held_out)) < 0.07
    questions = [record.messages[0]["content"] for record in train + held_out]
    answers = [record.messages[1]["content"] for record in train + held_out]
    assert len(set(answers)) == len(answers) and len(set(questions)) == len(questions)
    assert [record.origin for record in train] == sorted(record.origin for record in train)
    by_origin = {record.origin: record.messages for record in train + held_out}
    assert by_origin["python_docs:assert"][1]["content"].startswith('The "assert" statement')
    import json.decoder

    question, answer = (m["content"] for m in by_origin["python_docs:json.decoder.JSONDecoder.raw_decode"])
    assert answer.split() == json.decoder.JSONDecoder.raw_decode.__doc__.split()
    assert "`json.decoder.JSONDecoder.raw_decode`" in question


def test_python_docs_is_the_same_everywhere_and_imports_nothing():
    code = (
        "import sys, hashlib\n"
        "from automimo.data.python_docs import python_docs_records\n"
        "before = set(sys.modules)\n"
        "digest = hashlib.sha256(repr([list(python_docs_records(s)) for s in ('train', 'validation')]).encode())\n"
        "print(digest.hexdigest(), sorted(set(sys.modules) - before))\n"
    )
    env = os.environ | {"PYTHONHASHSEED": "1"}
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120, env=env)
    here = hashlib.sha256(repr([list(python_docs_records(split)) for split in ("train", "validation")]).encode())
    assert out.stdout.strip() == f"{here.hexdigest()} []"


def test_python_docs_does_not_depend_on_the_order_of_the_file_system(library, monkeypatch):
    expected = list(_documentation(library).items())
    walk = os.walk

    def backwards(root):
        for folder, subfolders, files in walk(root):
            subfolders.sort(reverse=True)
            files.sort(reverse=True)
            yield folder, subfolders, files

    _documentation.cache_clear()
    monkeypatch.setattr(os, "walk", backwards)
    assert list(_documentation(library).items()) == expected
