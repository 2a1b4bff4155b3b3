"""A model folder with new weights: config, weights, tokenizer and generation defaults, complete or not at all.

The weights are exactly those of `torch.manual_seed(seed); model.initialize_weights(dtype=torch.float32)`, but made and
written one part of the model (embedding, block, norm, head) at a time, so that a preset of 300 B parameters needs the
memory of its largest block, not of the model.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from automimo.checkpoint import TensorEntry, publish_folder, write_checkpoint, write_text_atomic
from automimo.errors import CheckpointError, ConfigError
from automimo.machine import GIB, free_disk_bytes, memory_bytes
from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig
from automimo.mimo_v2_flash.model import MODEL_CLASSES, MiMoV2FlashForCausalLM, model_class_of
from automimo.mimo_v2_flash.presets import preset_config
from automimo.mimo_v2_flash.source import read_config
from automimo.mimo_v2_flash.tokenizer import build_tokenizer, load_tokenizer, save_tokenizer, special_token_ids

# Presets that get a tokenizer of their own; the others share the released one, which cannot be made up and is copied.
TRAINED_TOKENIZER = ("tiny", "tiny-omni")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
# What ends an answer in the released models: ids 151645, 151643 and 151672.
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|mimo_audio_eod|>")
RELEASED_STOP_IDS = (151645, 151643, 151672)


def init_model(
    folder: str | Path,
    preset: str,
    *,
    seed: int = 0,
    tokenizer_texts: Iterable[str] | None = None,
    tokenizer_folder: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Make the Hugging Face folder of a new text model.

    The same preset, seed, texts and dtype give the same bytes. The tokenizer is, in this order: the files of
    `tokenizer_folder`; for the tiny presets a byte-level BPE trained on `tokenizer_texts` (default: the built-in Python
    documentation); none. `dtype` (default: the preset's) is that of the weights; the router stays fp32.

    Raises ConfigError for an unknown preset or a tokenizer that does not fit the vocabulary, CheckpointError when
    `folder` is not empty or disk or memory do not suffice (with the numbers). Nothing is left behind then.
    """
    # Vision and audio towers are not part of this version: a config that promised them would not fit the weights.
    config = preset_config(preset, vision_config=None, audio_config=None, processor_config=None)
    if dtype is not None:
        config.dtype = dtype
    target = Path(folder)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: exists and is not an empty folder; choose another folder or remove it")
    model = _meta_model(config)
    stored = model.lm_head.weight.dtype
    _check_resources(target, model, stored)
    tokenizer = _tokenizer(preset, tokenizer_texts, tokenizer_folder)
    if tokenizer is not None:
        _fit_tokenizer(config, tokenizer)

    def write(temporary: Path) -> None:
        write_checkpoint(temporary, PartwiseWeights(model, seed, stored).entries())
        model.write_config(temporary, None, stored)
        if tokenizer_folder is not None:
            _copy_tokenizer(Path(tokenizer_folder), temporary)
        elif tokenizer is not None:
            save_tokenizer(tokenizer, temporary)
        generation = generation_config(config, tokenizer)
        write_text_atomic(temporary / "generation_config.json", json.dumps(generation, indent=2) + "\n")

    publish_folder(target, write)


def run_init(folder: Path, preset: str, *, seed: int, tokenizer_folder: Path | None) -> int:
    """The verb `init`: make the folder and say what is in it."""
    init_model(folder, preset, seed=seed, tokenizer_folder=tokenizer_folder)
    model = _meta_model(read_config(folder, model_class_of(folder).config_class))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dtype = str(model.config.dtype).removeprefix("torch.")
    print(f"{folder}: preset {preset}, seed {seed}, {parameters:,} parameters in {dtype}")
    if (folder / "tokenizer.json").is_file():
        print(f"tokenizer: {len(load_tokenizer(folder)):,} tokens")
    else:
        print("no tokenizer: copy the released one into the folder, or run init again with --tokenizer FOLDER")
    if preset_config(preset).vision_config is not None:
        print("text part only: vision and audio towers are not part of this version")
    return 0


def generation_config(config: MiMoV2FlashConfig, tokenizer: PreTrainedTokenizerFast | None) -> dict[str, Any]:
    """Contents of generation_config.json: every id that ends an answer and the published sampling defaults.

    Temperature 0.8 for V2-Flash, 1.0 for V2.5 and V2.6, top-p 0.95 for all.
    """
    if tokenizer is None:
        stop_ids, pad = list(RELEASED_STOP_IDS), RELEASED_STOP_IDS[1]
    else:
        ids = special_token_ids(tokenizer)
        stop_ids, pad = [ids[token] for token in STOP_TOKENS if token in ids], ids[STOP_TOKENS[1]]
    return {
        "do_sample": True,
        "eos_token_id": stop_ids,
        "pad_token_id": pad,
        "temperature": 1.0 if isinstance(config, MiMoV2Config) else 0.8,
        "top_p": 0.95,
    }


class PartwiseWeights:
    """The initial weights of a model on the meta device, one part in memory at a time.

    Every part continues the random stream where the part before it stopped, so the result does not depend on how the
    model is cut. Where a stream starts is remembered: a part asked for again (shards are not written strictly in the
    order of the model) is made again, bit for bit.
    """

    def __init__(self, model: MiMoV2FlashForCausalLM, seed: int, dtype: torch.dtype) -> None:
        # On meta a cast is free; done later it would hold a part twice.
        self._model, self._dtype = model.to(torch.float32), dtype
        self._parts = model_parts(model)
        self._states = [torch.Generator().manual_seed(seed).get_state()]
        self._current: str | None = None
        self._made: dict[str, TensorEntry] = {}

    def entries(self) -> list[TensorEntry]:
        """What to write, in the order of the model; a tensor exists only while it is being written."""
        planned = self._model.checkpoint_entries(self._dtype)
        return [TensorEntry(e.key, e.dtype, e.shape, partial(self._produce, e.key)) for e in planned]

    def _produce(self, key: str) -> Any:
        names = list(self._parts)
        wanted = next(name for name in names if key.startswith(f"{name}."))
        if self._current != wanted:
            self._drop()
            position = names.index(wanted)
            # Parts that were skipped over must draw their numbers first.
            for skipped in range(len(self._states) - 1, position):
                self._make(names[skipped], skipped)
                self._drop()
            self._make(wanted, position)
            made = self._model.checkpoint_entries(self._dtype)
            self._made = {entry.key: entry for entry in made if entry.key.startswith(f"{wanted}.")}
        return self._made[key].produce()

    def _make(self, name: str, position: int) -> None:
        """Fill one part. The rest is on meta, where `initialize_weights` neither writes nor draws numbers."""
        self._parts[name].to_empty(device="cpu")
        self._current = name
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._states[position])
            self._model.initialize_weights(dtype=torch.float32)
            if len(self._states) == position + 1:
                self._states.append(torch.get_rng_state())

    def _drop(self) -> None:
        self._made = {}
        if self._current is not None:
            self._parts[self._current].to("meta")
            self._current = None


def model_parts(model: MiMoV2FlashForCausalLM) -> dict[str, nn.Module]:
    """Module name -> module, in the order in which `initialize_weights` draws; together they hold every parameter."""
    parts: dict[str, nn.Module] = {"model.embed_tokens": model.model.embed_tokens}
    parts.update((f"model.layers.{index}", block) for index, block in model.model.layers.items())
    return {**parts, "model.norm": model.model.norm, "lm_head": model.lm_head}


def _meta_model(config: MiMoV2FlashConfig) -> MiMoV2FlashForCausalLM:
    with torch.device("meta"):
        return MODEL_CLASSES[config.model_type].from_config(config)


def _check_resources(target: Path, model: MiMoV2FlashForCausalLM, dtype: torch.dtype) -> None:
    """Refuse before the first byte is written, with the numbers."""
    disk = sum(entry.nbytes for entry in model.checkpoint_entries(dtype))
    free = free_disk_bytes(target)
    if disk > free:
        raise CheckpointError(
            f"{target}: the weights take {disk / GIB:,.1f} GiB in {str(dtype).removeprefix('torch.')}, only "
            f"{free / GIB:,.1f} GiB are free on that disk; choose another folder or a smaller preset"
        )
    # One part in fp32; what is cast and written at a time is a single matrix.
    memory = max(4 * sum(tensor.numel() for tensor in part.parameters()) for part in model_parts(model).values())
    machine = memory_bytes()
    if machine is not None and memory > machine.available:
        raise CheckpointError(
            f"making the largest block takes {memory / GIB:,.1f} GiB of memory, only "
            f"{machine.available / GIB:,.1f} GiB are free; use a machine with more memory or a smaller preset"
        )


def _tokenizer(preset: str, texts: Iterable[str] | None, folder: str | Path | None) -> PreTrainedTokenizerFast | None:
    if folder is not None:
        return load_tokenizer(folder)
    if preset not in TRAINED_TOKENIZER:
        return None
    return build_tokenizer(python_docs_texts() if texts is None else texts, preset_config(preset).vocab_size)


def python_docs_texts() -> Iterator[str]:
    """The text of the built-in Python documentation, training part only, for the tokenizer of the tiny presets."""
    from automimo.data.python_docs import python_docs_records

    for record in python_docs_records("train"):
        yield from (message["content"] for message in record.messages)


def _fit_tokenizer(config: MiMoV2FlashConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Check that every id has an embedding, and name the tokenizer's special ids in the config."""
    if len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer):,} tokens, the preset's vocab_size is {config.vocab_size:,}; use a "
            "tokenizer that fits"
        )
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
