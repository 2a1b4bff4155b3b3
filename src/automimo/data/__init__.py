"""Text in, batches out: sources, rendered examples with a loss mask, packing, a resumable stream of batches.

Names are imported on first use, so that a recipe can be read without torch and transformers.
"""

from typing import TYPE_CHECKING

from automimo.lazy import lazy_names

if TYPE_CHECKING:
    from automimo.data.batches import Batch, DataStream, collate
    from automimo.data.loading import LoadReport, SourceReport, load_examples
    from automimo.data.packing import PackingPlan, Piece, plan_epoch
    from automimo.data.render import Example, Renderer, render_chat
    from automimo.data.show import colour_loss_mask
    from automimo.data.sources import ChatRecord, SourceSpec, TextRecord, read_source

_HOME = {
    "Batch": "batches",
    "ChatRecord": "sources",
    "DataStream": "batches",
    "Example": "render",
    "LoadReport": "loading",
    "PackingPlan": "packing",
    "Piece": "packing",
    "Renderer": "render",
    "SourceReport": "loading",
    "SourceSpec": "sources",
    "TextRecord": "sources",
    "collate": "batches",
    "colour_loss_mask": "show",
    "load_examples": "loading",
    "plan_epoch": "packing",
    "read_source": "sources",
    "render_chat": "render",
}
__all__ = [
    "Batch",
    "ChatRecord",
    "DataStream",
    "Example",
    "LoadReport",
    "PackingPlan",
    "Piece",
    "Renderer",
    "SourceReport",
    "SourceSpec",
    "TextRecord",
    "collate",
    "colour_loss_mask",
    "load_examples",
    "plan_epoch",
    "read_source",
    "render_chat",
]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
