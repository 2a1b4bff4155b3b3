"""The tokenizer of the family: determinism, special tokens, files, chat template."""

import json
import os
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from automimo.errors import DataError
from automimo.mimo_v2_flash.tokenizer import build_tokenizer, load_tokenizer, save_tokenizer, special_token_ids

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and it's not the first time!",
    "def add(a, b):\n    return a + b  # 1234 + 5678\n\n",
    "Größe, naïve café; 東京 and Москва; the theorem that they've shown.",
    "for item in items:\n\tprint(item, end='')\r\n",
]
SYSTEM = "You are MiMo, a helpful AI assistant engineered by Xiaomi."


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(SENTENCES * 3, 400)


def test_vocabulary_size_and_order_of_the_special_tokens(tokenizer):
    """Released ids (facts 1.6) minus 151643 are the distances between the special tokens; ours keep them."""
    released = {
        "<|endoftext|>": 151643,
        "<|im_start|>": 151644,
        "<|im_end|>": 151645,
        "<|vision_start|>": 151652,
        "<|vision_end|>": 151653,
        "<|image_pad|>": 151655,
        "<|video_pad|>": 151656,
        "<think>": 151667,
        "</think>": 151668,
        "<|audio_pad|>": 151669,
        "<|mimo_video_start|>": 151670,
        "<|mimo_video_end|>": 151671,
        "<|mimo_audio_eod|>": 151672,
        "<|mimo_audio_start|>": 151673,
        "<|mimo_audio_end|>": 151674,
    }
    assert len(tokenizer) == 400
    assert sorted(tokenizer.get_vocab().values()) == list(range(400))
    ids = special_token_ids(tokenizer)
    first = ids["<|endoftext|>"]
    assert {text: index - first for text, index in ids.items() if text in released} == {
        text: index - 151643 for text, index in released.items()
    }
    assert max(ids.values()) == 399 and len(ids) == 32
    for text, index in ids.items():
        assert tokenizer(text).input_ids == [index]


def test_pad_eos_and_no_bos(tokenizer):
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_token is None
    assert tokenizer("").input_ids == []
    assert tokenizer("Hello").input_ids == tokenizer("Hello", add_special_tokens=False).input_ids


def test_markup_stays_in_an_answer_and_control_tokens_do_not(tokenizer):
    ids = tokenizer("<think>a</think><tool_call>b</tool_call><|im_end|><|audio_pad|>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think><tool_call>b</tool_call>"


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_up_to_nfc(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == unicodedata.normalize("NFC", text)


def test_pretokenizer_cuts_like_qwen2(tokenizer):
    """Each digit alone, a word with its space, contractions apart, newlines with the punctuation before them."""
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("it's 12 a.\n\n  b")]
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in pieces] == [
        "it", "'s", " ", "1", "2", " a", ".\n\n", " ", " b",
    ]  # fmt: skip


def test_same_bytes_in_every_process_and_with_any_number_of_threads(tmp_path):
    code = (
        "import sys, random\n"
        "from automimo.mimo_v2_flash.tokenizer import build_tokenizer, save_tokenizer\n"
        "rng = random.Random(5)\n"
        "words = [''.join(rng.choices('abcdefgh', k=rng.randint(1, 6))) for _ in range(800)]\n"
        "texts = [' '.join(rng.choices(words, k=60)) for _ in range(300)]\n"
        "save_tokenizer(build_tokenizer(texts, 1200), sys.argv[1])\n"
    )
    outputs = []
    for threads, hash_seed in (("1", "1"), ("4", "77")):
        folder = tmp_path / threads
        env = os.environ | {
            "RAYON_NUM_THREADS": threads,
            "PYTHONHASHSEED": hash_seed,
            "TOKENIZERS_PARALLELISM": "false" if threads == "1" else "true",
        }
        subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=env, timeout=120)
        outputs.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert set(outputs[0]) >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert outputs[0] == outputs[1]


def test_save_and_load_give_the_same_tokenizer(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    # A model folder: transformers must not fall back on another class because of the model type.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mimo_v2_flash"}))
    text = "<|im_start|>user\nit's 東京 <think> 42\n\n<|im_end|>"
    for loaded in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
        assert loaded(text).input_ids == tokenizer(text).input_ids
        assert loaded.chat_template == tokenizer.chat_template
        assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert loaded.bos_token is None
        assert special_token_ids(loaded) == special_token_ids(tokenizer)


def test_errors_say_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"vocab_size 287 is too small.*288"):
        build_tokenizer(SENTENCES, 287)
    with pytest.raises(DataError, match=r"give only 29. tokens, vocab_size is 4000"):
        build_tokenizer(["aaaa bbbb aaaa bbbb"], 4000)
    assert len(build_tokenizer([], 288)) == 288


def test_no_remote_code_is_run(tokenizer, tmp_path):
    """A folder that names its own tokenizer class gives its data and nothing else."""
    save_tokenizer(tokenizer, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    assert load_tokenizer(tmp_path)("Hello").input_ids == tokenizer("Hello").input_ids
    assert not (tmp_path / "ran").exists()


# Chat template


def render(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


def test_golden_prompt(tokenizer):
    """The released 27-id prompt (facts 1.6): its control ids, the line feeds (198) and what lies between them."""
    golden = (
        "151644 8948 198 2610 525 20740 25612 11 264 10950 15235 17847 44936 553 71449 13 151645 "
        "151644 872 198 9707 151645 151644 77091 198 151667 151668"
    )
    shape = {"151644": "S", "151645": "E", "151667": "t", "151668": "T", "198": "n"}
    golden_shape = "".join(shape.get(index, "x") for index in golden.split())

    prompt = render(
        tokenizer, [{"role": "user", "content": "Hello"}], add_generation_prompt=True, enable_thinking=False
    )
    assert prompt == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|><|im_start|>user\nHello<|im_end|><|im_start|>assistant\n<think></think>"
    )
    ids = tokenizer(prompt).input_ids
    special = special_token_ids(tokenizer)
    ours = {
        special["<|im_start|>"]: "S",
        special["<|im_end|>"]: "E",
        special["<think>"]: "t",
        special["</think>"]: "T",
        tokenizer("\n").input_ids[0]: "n",
    }
    our_shape = "".join(ours.get(index, "x") for index in ids)
    # The number of text tokens depends on the merges; where there are any does not.
    squeeze = lambda text: "".join(c for i, c in enumerate(text) if c != "x" or text[i - 1] != "x")  # noqa: E731
    assert squeeze(our_shape) == squeeze(golden_shape)


def test_generation_prompt(tokenizer):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    head = "<|im_start|>system\nS<|im_end|><|im_start|>user\nU<|im_end|>"
    assert render(tokenizer, messages) == head
    assert render(tokenizer, messages, add_generation_prompt=True) == head + "<|im_start|>assistant\n"
    assert (
        render(tokenizer, messages, add_generation_prompt=True, enable_thinking=False)
        == head + "<|im_start|>assistant\n<think></think>"
    )


CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1", "reasoning_content": "r1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2", "reasoning_content": "r2"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "<think>\nr3\n</think>\n\n3"},
]


def test_reasoning_is_kept_or_dropped(tokenizer):
    def expected(first, second):
        return (
            "<|im_start|>system\nS<|im_end|><|im_start|>user\none<|im_end|>"
            f"<|im_start|>assistant\n<think>{first}</think>1<|im_end|>"
            f"<|im_start|>user\ntwo<|im_end|><|im_start|>assistant\n<think>{second}</think>2<|im_end|>"
            "<|im_start|>user\nthree<|im_end|><|im_start|>assistant\n<think>\nr3\n</think>\n\n3<|im_end|>"
        )

    assert render(tokenizer, CONVERSATION) == expected("r1", "r2")
    assert render(tokenizer, CONVERSATION, keep_all_reasoning=True) == expected("r1", "r2")
    assert render(tokenizer, CONVERSATION, keep_all_reasoning=False) == expected("", "")


@pytest.mark.parametrize(
    ("content", "rendered"),
    [
        ("<think>a</think>b", "<think>a</think>b"),
        ("a</think>b", "<think>a</think>b"),
        ("a</think>b</think>c", "<think>a</think>b</think>c"),
        (" <think>a</think>b", "<think>a</think>b"),
        ("<think></think>b", "<think></think>b"),
        ("plain", "<think></think>plain"),
    ],
)
def test_reasoning_inside_the_content_is_split_off(tokenizer, content, rendered):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    assert render(tokenizer, messages).endswith(f"<|im_start|>assistant\n{rendered}<|im_end|>")


def test_reasoning_content_wins_over_a_think_mark_in_the_content(tokenizer):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "the mark </think> ends it", "reasoning_content": "r"},
    ]
    assert render(tokenizer, messages).endswith("assistant\n<think>r</think>the mark </think> ends it<|im_end|>")


def test_tools_calls_and_results(tokenizer):
    tools = [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Weather of a city.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "description": "Its name."},
                        "unit": {"type": "string", "enum": ["C", "F"]},
                    },
                    "required": ["city"],
                },
            },
        }
    ]
    messages = [
        {"role": "user", "content": "Paris and Rome?"},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "two calls",
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}}},
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "alerts": [True]}}},
            ],
        },
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "Sun, rain."},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
        {"role": "tool", "content": "noon"},
    ]
    text = render(tokenizer, messages, tools=tools)
    system, conversation = text.split("<|im_end|>", 1)
    assert system.startswith(f"<|im_start|>system\n{SYSTEM}\n\n# Tools\n\n")
    assert (
        "<tools>\n<function>\n<name>weather</name>\n<description>Weather of a city.</description>\n<parameters>\n"
        "<parameter>\n<name>city</name>\n<type>string</type>\n<description>Its name.</description>\n</parameter>\n"
        '<parameter>\n<name>unit</name>\n<type>string</type>\n<enum>["C", "F"]</enum>\n</parameter>\n'
        '<required>["city"]</required>\n</parameters>\n</function>\n</tools>\n\n'
    ) in system
    assert conversation == (
        "<|im_start|>user\nParis and Rome?<|im_end|>"
        "<|im_start|>assistant\n<think>two calls</think>Looking.\n"
        "<tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</tool_call>\n"
        "<tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n<parameter=alerts>[true]</parameter>\n"
        "</function>\n</tool_call><|im_end|>"
        "<|im_start|>tool\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>\n<|im_end|>"
        "<|im_start|>assistant\n<think></think>Sun, rain.<|im_end|>"
        "<|im_start|>assistant\n<think></think><tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>"
        "<|im_start|>tool\n<tool_response>\nnoon\n</tool_response>\n<|im_end|>"
    )


def test_media_parts_become_placeholders(tokenizer):
    content = [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "video"}, {"type": "text", "text": "!"}]
    assert render(tokenizer, [{"role": "user", "content": content}]).endswith(
        "<|im_start|>user\nSee <|vision_start|><|image_pad|><|vision_end|>"
        "<|vision_start|><|video_pad|><|vision_end|>!<|im_end|>"
    )
