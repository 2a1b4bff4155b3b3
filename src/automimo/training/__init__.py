"""Training: the typed recipe, the optimizer, the loop, evaluation, metrics and the run folder."""
