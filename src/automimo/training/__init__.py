"""Training: the typed recipe, the optimizer, the loop, evaluation, metrics and the run folder.

Names are imported on first use, so that reading a recipe imports no torch.
"""

from typing import TYPE_CHECKING

from automimo.lazy import lazy_names

if TYPE_CHECKING:
    from automimo.training.recipe import Recipe
    from automimo.training.recipe_file import dump_recipe, load_recipe, parse_recipe
    from automimo.training.run import run_training

_HOME = {
    "Recipe": "recipe",
    "dump_recipe": "recipe_file",
    "load_recipe": "recipe_file",
    "parse_recipe": "recipe_file",
    "run_training": "run",
}
__all__ = ["Recipe", "dump_recipe", "load_recipe", "parse_recipe", "run_training"]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
