"""The loss mask in colour, for people."""

from rich.text import Text
from transformers import PreTrainedTokenizerFast

from automimo.data.render import Example

SUPERVISED_STYLE = "green"
PROMPT_STYLE = "dim"


def colour_loss_mask(example: Example, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The whole example as text: supervised tokens green, prompt dim; control tokens are written out."""
    text = Text()
    start, mask = 0, example.target_mask
    while start < len(mask):
        stop = start + 1
        while stop < len(mask) and mask[stop] == mask[start]:
            stop += 1
        # A whole run at once: a single token may be a part of a character.
        words = tokenizer.decode(example.input_ids[start:stop].tolist(), skip_special_tokens=False)
        text.append(str(words), style=SUPERVISED_STYLE if mask[start] else PROMPT_STYLE)
        start = stop
    return text
