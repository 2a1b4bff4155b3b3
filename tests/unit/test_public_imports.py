"""Every module imports, every public name exists, and the package's own names come from where they should."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import automimo

MODULES = sorted(
    module.name for module in pkgutil.walk_packages([str(Path(automimo.__file__).parent)], prefix="automimo.")
)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "automimo.__main__"])
def test_every_module_imports_and_has_what_it_announces(name: str) -> None:
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip(), f"{name} says nothing about itself"
    for public in getattr(module, "__all__", ()):
        assert getattr(module, public) is not None, f"{name}.{public}"


def test_the_order_of_imports_does_not_matter() -> None:
    """A circle shows only in a certain order; the test above imports forwards, this fresh interpreter backwards."""
    names = [name for name in reversed(MODULES) if name != "automimo.__main__"]
    code = "import importlib, sys; [importlib.import_module(n) for n in sys.argv[1:]]"
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", automimo.__all__)
def test_public_names_of_the_package(name: str) -> None:
    value = getattr(automimo, name)
    assert name in dir(automimo)
    if name not in ("__version__", "PRESETS"):
        assert value.__name__ == name
        # A public name must not be shadowed by a module of the same name once that module has been imported.
        assert f"automimo.{name}" not in MODULES


def test_errors_are_one_family() -> None:
    for name in ("ConfigError", "CheckpointError", "DataError", "TrainingError"):
        assert issubclass(getattr(automimo, name), automimo.AutoMiMoError)


def test_the_list_of_names_is_complete_and_sorted_by_kind() -> None:
    assert set(automimo.__all__) == {*automimo._HOME, "__version__"}
    assert len(automimo.__all__) == len(set(automimo.__all__))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = automimo.nonsense


def test_the_version_is_that_of_the_installation() -> None:
    from importlib.metadata import version

    assert automimo.__version__ == version("automimo")
