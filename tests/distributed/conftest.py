"""What the tests of whole runs share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_calls import Starter, make_base, shared


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all pytest workers; `run_calls.reference` makes undisturbed runs there, each once."""
    return shared(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def base(runs_folder: Path) -> Path:
    """A model folder and data: see `run_calls.make_base`."""
    return make_base(runs_folder)


@pytest.fixture
def runs(base: Path, tmp_path: Path) -> Iterator[Starter]:
    """Starts runs of its recipe in an output of its own."""
    starter = Starter(tmp_path, base)
    yield starter
    starter.close()
