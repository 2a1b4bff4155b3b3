"""`save_pretrained`: a model becomes a Hugging Face folder, complete or not at all.

The part that knows the model is the subclass. It offers two things, and this module the rest (shards, side files,
publication):

- `folder_contents(source, dtype, layout)`: every tensor of the folder, as units that make their tensors when their turn
  comes: its own, and those it only carries (MTP, vision, audio) from the source. The same units on all ranks.
- `write_config(folder, source, dtype, layout)`: writes `config.json`.
"""

from abc import ABCMeta, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from automimo.checkpoint.collective_writer import write_contents
from automimo.checkpoint.publish import publish_together
from automimo.checkpoint.reader import CheckpointReader
from automimo.checkpoint.side_files import copy_side_files
from automimo.checkpoint.units import FolderContents
from automimo.checkpoint.writer import MAX_SHARD_BYTES
from automimo.distributed.world import on_main, together
from automimo.errors import CheckpointError

Layout = Literal["split", "source"]


class Checkpointer(Protocol):
    """Something else that can write a model, such as a distributed checkpointer."""

    def save_model(self, model: Any, weights_path: str, peft_config: Any = None, tokenizer: Any = None) -> None: ...


class Tokenizer(Protocol):
    def save_pretrained(self, save_directory: str, /) -> Any: ...


# Not a subclass of ABC: FSDP2 exchanges the class of a model, which Python refuses where a base class before nn.Module
# has empty slots, as ABC does.
class HFCheckpointingMixin(metaclass=ABCMeta):
    """Gives a model `save_pretrained`. Mixed in before `torch.nn.Module`; does not touch `state_dict`."""

    @abstractmethod
    def folder_contents(
        self, source: CheckpointReader | None, dtype: torch.dtype | None, layout: Layout
    ) -> FolderContents:
        """All tensors of the folder to write; `source` is the open checkpoint to carry tensors from, `dtype` the one to
        store trained matrices in (None: as they are), `layout` as in `save_pretrained`."""

    @abstractmethod
    def write_config(self, folder: Path, source: Path | None, dtype: torch.dtype | None, layout: Layout) -> None:
        """Write `config.json` into `folder`."""

    def save_pretrained(
        self,
        save_directory: str | Path,
        checkpointer: Checkpointer | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        dtype: torch.dtype | None = None,
        layout: Layout = "split",
        source: str | Path | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        replace: bool = False,
        peft_config: Any = None,
    ) -> None:
        """Write the model as a Hugging Face folder that appears complete or not at all.

        `source` is the checkpoint folder the model came from: tensors the model only carries and all side files are
        copied from it byte for byte. `layout` "split" stores trained matrices plain, in `dtype`; "source" stores them
        as the source does (layout, quantisation and dtypes). `tokenizer` writes its own files, which then win over
        those of `source`. An existing, non-empty `save_directory` is refused unless `replace`. With a `checkpointer`
        everything but `peft_config` and `tokenizer` is its business: it is called instead of the built-in writer.

        In a run of several processes all of them have to call this, with the same arguments, on a disk that all see.
        Each writes its share of the tensors into files of its own; no process ever holds the model.

        Raises CheckpointError; nothing is left behind then. Where it is raised in one process, the others raise
        DistributedError.
        """
        if layout == "source" and (source is None or dtype is not None):
            raise CheckpointError(
                "save_pretrained(layout='source') takes the dtypes of a source: give source, no dtype"
            )
        if checkpointer is not None:
            checkpointer.save_model(
                model=self, weights_path=str(save_directory), peft_config=peft_config, tokenizer=tokenizer
            )
            return

        def write(folder: Path) -> None:
            self.write_folder(
                folder, tokenizer, dtype=dtype, layout=layout, source=source, max_shard_bytes=max_shard_bytes
            )

        publish_together(save_directory, write, replace=replace)

    def write_folder(
        self,
        folder: Path,
        tokenizer: Tokenizer | None = None,
        *,
        dtype: torch.dtype | None = None,
        layout: Layout = "split",
        source: str | Path | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Write all files of `save_pretrained` into the new, empty `folder`, for a caller that adds more to it and
        publishes it. What fails on one rank fails on all; some files are left then."""
        what = f"exporting to {folder}"
        with ExitStack() as stack:
            with together(what):
                reader = stack.enter_context(CheckpointReader(source)) if source is not None else None
                contents = self.folder_contents(reader, dtype, layout)
            write_contents(folder, contents, max_shard_bytes)

        def write_others() -> str:
            self.write_config(folder, None if source is None else Path(source), dtype, layout)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(folder))
            if source is not None:
                written = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
                copy_side_files(source, folder, skip=written)
            return ""

        on_main(what, write_others)
