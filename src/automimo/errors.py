"""The errors a user can cause, and mend.

Each carries one readable message that names the value, the key or file it came from, and the remedy. The command line
prints that message alone and exits with 1; `--debug` adds the traceback. Anything else that is raised is a fault of
ours and is reported as one.
"""


class AutoMiMoError(Exception):
    """Base of every error that is meant to be read by a user."""


class ConfigError(AutoMiMoError, ValueError):
    """A model config, backend or recipe that is wrong or contradicts itself."""


class CheckpointError(AutoMiMoError, ValueError):
    """A checkpoint folder that is malformed, incomplete, hostile or of a layout that is not supported."""


class DataError(AutoMiMoError, ValueError):
    """A data source, record or tokenizer that cannot be used."""


class TrainingError(AutoMiMoError, RuntimeError):
    """A run that cannot go on: a non-finite loss, a recipe that no longer fits its checkpoint."""


class DistributedError(AutoMiMoError, RuntimeError):
    """Work that several processes do together failed on another one, or contact to it was lost."""
