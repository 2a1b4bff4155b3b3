"""`save_pretrained`: a model becomes a Hugging Face folder, complete or not at all.

The part that knows the model is the subclass. It offers two things, and this module the rest (shards, side files,
publication):

- `checkpoint_entries(source, dtype)`: every tensor of the folder. Its own as `TensorEntry` whose `produce` makes one
  tensor when its turn comes; those it only carries (MTP, vision, audio) as `raw_entry(source, key)`.
- `write_config(folder, dtype)`: writes `config.json`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from automimo.checkpoint.publish import publish_folder
from automimo.checkpoint.reader import CheckpointReader
from automimo.checkpoint.side_files import copy_side_files
from automimo.checkpoint.writer import MAX_SHARD_BYTES, TensorEntry, write_checkpoint


class Checkpointer(Protocol):
    """Something else that can write a model, such as a distributed checkpointer."""

    def save_model(self, model: Any, weights_path: str, peft_config: Any = None, tokenizer: Any = None) -> None: ...


class Tokenizer(Protocol):
    def save_pretrained(self, save_directory: str, /) -> Any: ...


class HFCheckpointingMixin(ABC):
    """Gives a model `save_pretrained`. Mixed in before `torch.nn.Module`; does not touch `state_dict`."""

    @abstractmethod
    def checkpoint_entries(self, source: CheckpointReader | None, dtype: torch.dtype | None) -> Sequence[TensorEntry]:
        """All tensors of the folder to write; `source` is the open checkpoint to carry tensors from, `dtype` the one to
        store trained matrices in (None: as they are)."""

    @abstractmethod
    def write_config(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write `config.json` into `folder`."""

    def save_pretrained(
        self,
        save_directory: str | Path,
        checkpointer: Checkpointer | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        dtype: torch.dtype | None = None,
        source: str | Path | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        replace: bool = False,
        peft_config: Any = None,
    ) -> None:
        """Write the model as a Hugging Face folder that appears complete or not at all.

        `source` is the checkpoint folder the model came from: tensors the model only carries and all side files are
        copied from it byte for byte. `tokenizer` writes its own files, which then win over those of `source`. An
        existing, non-empty `save_directory` is refused unless `replace`. With a `checkpointer` everything but
        `peft_config` and `tokenizer` is its business: it is called instead of the built-in writer.

        Raises CheckpointError; nothing is left behind then.
        """
        if checkpointer is not None:
            checkpointer.save_model(
                model=self, weights_path=str(save_directory), peft_config=peft_config, tokenizer=tokenizer
            )
            return

        def write(folder: Path) -> None:
            with ExitStack() as stack:
                reader = stack.enter_context(CheckpointReader(source)) if source is not None else None
                entries = self.checkpoint_entries(reader, dtype)
                write_checkpoint(folder, entries, max_shard_bytes=max_shard_bytes)
            self.write_config(folder, dtype)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(folder))
            if source is not None:
                written = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
                copy_side_files(source, folder, skip=written)

        publish_folder(save_directory, write, replace=replace)
