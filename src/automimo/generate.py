"""Generation with a KV cache: greedy or sampled, several prompts at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automimo.attention import KVCache
from automimo.backend import BackendConfig
from automimo.errors import CheckpointError, ConfigError, DataError
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, model_class_of
from automimo.mimo_v2_flash.source import resolve_folder
from automimo.mimo_v2_flash.tokenizer import load_tokenizer

# logits / temperature must stay finite in fp32, where it ends at 3e38.
LOWEST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1.0 keep the whole vocabulary.

    Raises ConfigError for values out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature != 0 and not self.temperature >= LOWEST_TEMPERATURE:
            raise ConfigError(
                f"temperature must be 0 (greedy) or at least {LOWEST_TEMPERATURE:g}, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be 0 (all) or more, got {self.top_k}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed must fit in 64 bits, got {self.seed}")


@torch.no_grad()
def generate(
    model: MiMoV2FlashForCausalLM,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stop_ids: Iterable[int],
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Continue token id `prompts`; returns the new ids of each, without the stop id that ended it.

    All prompts run as one packed stream, then one token per unfinished sequence and step. Sliding layers keep only
    their window. `on_token` is called with (index of the prompt, id) for every new token.

    Raises DataError for an empty prompt, CheckpointError for logits that are not finite.
    """
    if not prompts or not all(prompts):
        raise DataError("generate: a prompt has no tokens; pass at least one token per prompt")
    was_training = model.training
    model.eval()
    device = model.lm_head.weight.device
    generator = torch.Generator(device=device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    stops = set(stop_ids)
    cache = KVCache(model.config.num_hidden_layers)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ends = lengths.cumsum(0).to(device)
    stream = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    cu_seqlens = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
    logits = model(stream, cu_seqlens=cu_seqlens, cache=cache, logits_to_keep=ends - 1).logits[0]
    results: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    for step in range(sampling.max_new_tokens):
        if not torch.isfinite(logits).all():
            raise CheckpointError(
                "the model's logits are not finite: its weights are broken, or too large for its dtype"
            )
        chosen = choose(logits, sampling, generator)
        kept = []
        for row, token in enumerate(chosen.tolist()):
            if token in stops:
                continue
            results[alive[row]].append(token)
            kept.append(row)
            if on_token is not None:
                on_token(alive[row], token)
        if not kept or step + 1 == sampling.max_new_tokens:
            break
        if len(kept) < len(alive):
            rows = torch.tensor(kept, device=device)
            cache.drop(rows)
            chosen = chosen.index_select(0, rows)
            alive = [alive[row] for row in kept]
        logits = model(chosen.unsqueeze(1), cache=cache).logits[:, -1]
    model.train(was_training)
    return results


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The next token of every row of logits [B, V] -> int64 [B].

    Order of the filters: temperature, top-k, then top-p over what is left (the smallest set of tokens whose
    probabilities reach top_p; the most likely token always stays).
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores = logits.float() / sampling.temperature
    ordered, order = scores.sort(dim=-1, descending=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = -torch.inf
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    probabilities[:, 0].clamp_(min=torch.finfo(probabilities.dtype).tiny)
    picked = torch.multinomial(probabilities, 1, generator=generator)
    return order.gather(1, picked).squeeze(1)


@dataclass(frozen=True)
class Chat:
    """A model with its tokenizer and stop ids, ready to answer."""

    model: MiMoV2FlashForCausalLM
    tokenizer: Any
    stop_ids: tuple[int, ...]

    def prompt_ids(self, messages: list[dict[str, Any]], *, thinking: bool = True) -> list[int]:
        """Token ids of a conversation up to where the assistant begins, by the checkpoint's own template.

        Raises DataError: there is no template, it fails, or the conversation is not text that UTF-8 can hold.
        """
        if not self.tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template; put chat_template.jinja into the model folder")
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, enable_thinking=thinking, tokenize=False
            )
            rendered.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"the prompt is not UTF-8 text ({error.object[error.start]!r}); retype it") from error
        except Exception as error:  # a template is a program of its own, and may raise whatever it likes
            raise DataError(f"the chat template of the tokenizer failed: {error}; mend chat_template.jinja") from error
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def answer(
        self,
        messages: list[dict[str, Any]],
        sampling: Sampling,
        *,
        thinking: bool = True,
        on_token: Callable[[int, int], None] | None = None,
    ) -> str:
        """The assistant's next message as text, special tokens left out."""
        ids = self.prompt_ids(messages, thinking=thinking)
        (new_ids,) = generate(self.model, [ids], sampling, self.stop_ids, on_token)
        return str(self.tokenizer.decode(new_ids, skip_special_tokens=True))


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    backend: BackendConfig | None = None,
    revision: str | None = None,
) -> MiMoV2FlashForCausalLM:
    """The model of a checkpoint folder or Hub id, of the class its config.json asks for."""
    folder = resolve_folder(name_or_path, revision)
    return model_class_of(folder).from_pretrained(str(folder), dtype=dtype, backend=backend, revision=revision)


def load_chat(name_or_path: str | Path, *, dtype: torch.dtype | None = None, revision: str | None = None) -> Chat:
    """Model, tokenizer and stop ids of a checkpoint folder or Hub id."""
    folder = resolve_folder(name_or_path, revision)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, dtype=dtype)
    return Chat(model, tokenizer, stop_token_ids(folder, tokenizer))


def stop_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: those of generation_config.json, and the tokenizer's end and padding tokens.

    The released config.json declares only <|im_end|> although <|endoftext|> ends answers as well.
    """
    path = folder / "generation_config.json"
    declared = _generation_config(path).get("eos_token_id") if path.is_file() else None
    ids = declared if isinstance(declared, list) else [declared]
    if any(token is not None and type(token) is not int for token in ids):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, is {declared!r}")
    ids = [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return tuple(sorted({token for token in ids if token is not None}))


def _generation_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}; mend or remove it") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object; mend or remove it")
    return values
