"""The tokenizer of the family: make a small one from text, save it, load one from a folder.

It is a byte-level BPE in the manner of Qwen2: NFC, Qwen2's pre-tokenizer expression, no BOS. The special tokens are
those of the released models, by their strings and in their order, so that a small tokenizer differs from the
released one only in its merges and in where the ids start.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from automimo.errors import DataError

# The text before a token is cut here first; merges never cross a cut. As in every release of the family.
_PRETOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# (string, control token?) in the order of the released ids, the first one being 151643. A control token never comes
# out of the text of a message and is left out by `decode(skip_special_tokens=True)`; the others are markup that a
# model writes itself (reasoning, tool calls) and that people want to see in its answer.
SPECIAL_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
    ("<|audio_pad|>", True),
    ("<|mimo_video_start|>", True),
    ("<|mimo_video_end|>", True),
    ("<|mimo_audio_eod|>", True),
    ("<|mimo_audio_start|>", True),
    ("<|mimo_audio_end|>", True),
)
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)


def chat_template() -> str:
    """Our chat template (Jinja), which follows the released ones of V2.5."""
    return (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `texts`: `vocab_size` tokens, the special ones (the last 32 ids) included.

    The same texts give the same tokenizer, byte for byte, in every process and with any number of threads. pad is
    <|endoftext|>, eos is <|im_end|>, there is no bos and no unknown token (every byte has one).

    Raises DataError when `vocab_size` is under 288 (256 bytes + special tokens) or more than the texts can fill.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special tokens need "
            f"{SMALLEST_VOCABULARY}"
        )
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRETOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    # One call per token: a batch of mixed kinds would be grouped by kind and lose the order of the released ids.
    for text, control in SPECIAL_TOKENS:
        token = AddedToken(text, special=control, normalized=False)
        if control:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])
    if backend.get_vocab_size() != vocab_size:
        raise DataError(
            f"the texts give only {backend.get_vocab_size()} tokens, vocab_size is {vocab_size}: lower it, or give "
            "more text"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=chat_template(),
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Write the files that transformers reads (`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`)."""
    tokenizer.save_pretrained(str(folder))


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a local folder or, when there is no such folder and the name reads `owner/name`, of the Hub.

    Reads data files alone, never code of the checkpoint. Raises DataError when there is none or it is broken.
    """
    path = Path(folder)
    is_hub_id = not path.exists() and str(folder).count("/") == 1 and not str(folder).startswith((".", "/", "~"))
    if not is_hub_id and not path.is_dir():
        raise DataError(f"{folder}: no such folder, so no tokenizer in it")
    if not is_hub_id and not (path / "tokenizer.json").is_file():
        raise DataError(f"{folder}: no tokenizer.json in this folder; copy the tokenizer files of the model into it")
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception as error:
        raise DataError(f"{folder}: the tokenizer cannot be read: {error}") from error


def special_token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Ids of those special tokens of the family that `tokenizer` has, by their strings."""
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
    return {text: added[text] for text, _ in SPECIAL_TOKENS if text in added}
