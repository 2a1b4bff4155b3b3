"""The command line before a verb does its work: help, usage errors, what becomes of exceptions."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from automimo import __version__
from automimo.cli import app
from automimo.cli_errors import describe_os_error, exit_code_of
from automimo.errors import CheckpointError, ConfigError, DataError, TrainingError

from .conftest import Completed, check_readable_failure, run_cli

VERBS = ["init", "train", "generate", "evaluate", "inspect", "convert", "report", "doctor"]
ESCAPE = "\x1b"


def test_help_names_every_verb_and_prints_no_colour_into_a_pipe() -> None:
    done = run_cli("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert ESCAPE not in done.stdout
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout
    assert "..." not in done.stdout.split("Commands:")[1], "a verb's one-line help is cut off"


def test_the_verbs_are_those_of_this_version() -> None:
    assert [command.callback.__name__ for command in app.registered_commands if command.callback] == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself(verb: str, call: Callable[..., Completed]) -> None:
    done = call(verb, "-h")
    assert done.returncode == 0
    assert f"Usage: automimo {verb}" in done.stdout


def test_help_wraps_in_a_narrow_terminal() -> None:
    """The columns of arguments keep a least width, so a few characters may stand out; sentences never do."""
    done = run_cli("train", "--help", env={"COLUMNS": "44"})
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 50
    assert "  Train as a recipe says; the same command\n  resumes." in done.stdout


def test_version(call: Callable[..., Completed]) -> None:
    assert call("--version").stdout == f"automimo {__version__}\n"


def test_the_console_script_is_the_same_command() -> None:
    script = shutil.which("automimo", path=str(Path(sys.executable).parent))
    assert script is not None, "the project is not installed in this environment"
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
    assert done.stdout == run_cli("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train"], "Missing argument 'RECIPE'"),
        (["init", "x"], "Missing option '--preset'"),
        (["generate", "m", "--prompt", "p", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["generate", "m"], "Missing option '--prompt'"),
        (["inspect", "r.yaml", "--samples", "0"], "greater than or equal to 1"),
        (["doctor", "--colour"], "No such option"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    arguments: list[str], message: str, call: Callable[..., Completed]
) -> None:
    check_readable_failure(call(*arguments), "Usage: automimo", message, code=2)


def test_no_arguments_show_the_help(call: Callable[..., Completed]) -> None:
    done = call()
    assert "Commands:" in done.stdout + done.stderr


@pytest.mark.parametrize("error", [ConfigError, CheckpointError, DataError, TrainingError])
def test_our_errors_are_one_message(error: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error("model.window: -1 is below 1; give the number of keys")

    assert exit_code_of(fail, debug=False) == 1
    assert capsys.readouterr() == ("", "error: model.window: -1 is below 1; give the number of keys\n")


def test_an_unexpected_error_names_itself_and_the_way_to_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise KeyError("layer\n3")

    assert exit_code_of(fail, debug=False) == 1
    err = capsys.readouterr().err
    assert err.startswith("internal error: KeyError: ")
    assert err.endswith("(rerun with --debug for the traceback)\n")
    assert err.count("\n") == 1
    assert exit_code_of(fail, debug=True) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert 'raise KeyError("layer\\n3")' in err
    assert "--debug" not in err.splitlines()[-1]


def test_ctrl_c_and_codes_of_the_work_itself(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    assert exit_code_of(interrupt, debug=False) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert exit_code_of(lambda: 143, debug=False) == 143
    assert exit_code_of(lambda: None, debug=False) == 0


def test_errors_of_the_operating_system_are_words() -> None:
    assert describe_os_error(FileNotFoundError(2, "No such file or directory", "a.json")) == (
        "No such file or directory: a.json"
    )
    assert describe_os_error(OSError(28, "No space left on device")) == "No space left on device"
    assert describe_os_error(OSError("connection lost")) == "connection lost"
    assert describe_os_error(PermissionError(13, "Permission denied", "a", None, "b")) == "Permission denied: a: b"


def test_a_full_disk_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    def fill() -> int:
        with Path("/dev/full").open("w") as file:
            file.write("x" * 10_000)
        return 0

    assert exit_code_of(fill, debug=False) == 1
    assert capsys.readouterr().err == "error: No space left on device\n"


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_is_accepted_on_both_sides_of_the_verb(
    place: str, tmp_path: Path, call: Callable[..., Completed]
) -> None:
    verb = ["report", str(tmp_path / "nowhere")]
    done = call(*(["--debug", *verb] if place == "before" else [*verb, "--debug"]))
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    # The next call in the same process starts without it.
    check_readable_failure(call(*verb), "no such run folder")


def test_a_closed_pipe_ends_quietly(tiny_run: Path) -> None:
    """`automimo report RUN | head -c 1`: the reader is gone before we have written everything."""
    command = [sys.executable, "-u", "-m", "automimo", "report", str(tiny_run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=60) == 1
    assert err == ""
