"""The command line: finding commands, usage errors, typed errors, clean output."""

import importlib
import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest

from cam_jax.cli import main as cli
from cam_jax.cli.console import write_json
from cam_jax.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Options:
    times: int = 1
    """How often."""


@pytest.fixture
def command(monkeypatch):
    """Register a command `try` that runs the given function."""

    def register(run):
        module = types.ModuleType("tests.fake_command")
        module.Options, module.run = Options, run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        entry = cli.Command(name="try", module=module.__name__, summary="A command of the tests.")
        monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, entry))

    return register


def test_options_arrive_and_the_exit_code_comes_back(command):
    command(lambda options: options.times)
    assert cli.main(["try", "--times", "3"]) == 3
    command(lambda options: None)
    assert cli.main(["try"]) == 0


def test_a_typed_error_is_one_line_and_exit_code_two(command, capsys, monkeypatch):
    def run(options):
        raise InputError("prompt 3 is empty;\n  give at least one token")

    command(run)
    monkeypatch.delenv("CAM_JAX_DEBUG", raising=False)
    assert cli.main(["try"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "cam-jax: error: prompt 3 is empty; give at least one token\n"


def test_debug_shows_the_traceback(command, monkeypatch):
    def run(options):
        raise InputError("bad prompt")

    command(run)
    monkeypatch.setenv("CAM_JAX_DEBUG", "1")
    with pytest.raises(InputError, match="bad prompt"):
        cli.main(["try"])


def test_a_fault_of_the_program_is_not_hidden(command):
    def run(options):
        raise KeyError("x")

    command(run)
    with pytest.raises(KeyError):
        cli.main(["try"])


def test_an_interrupt_has_its_exit_code(command, capsys):
    def run(options):
        raise KeyboardInterrupt

    command(run)
    assert cli.main(["try"]) == 130
    assert capsys.readouterr().err == "cam-jax: interrupted\n"


@pytest.mark.parametrize("arguments", [[], ["nope"], ["try", "--nope"], ["try", "--times", "x"]])
def test_usage_errors_exit_with_two(command, arguments, capsys):
    command(lambda options: pytest.fail("ran"))
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "--help" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(command.name in out for command in cli.COMMANDS)


@pytest.mark.parametrize("entry", cli.COMMANDS, ids=lambda entry: entry.name)
def test_every_command_has_options_and_help(entry, capsys):
    module = importlib.import_module(entry.module)
    assert callable(module.run)
    with pytest.raises(SystemExit) as caught:
        cli.main([entry.name, "--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"cam-jax {entry.name}" in out
    assert entry.summary in out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("cam-jax 0.")


def test_env_as_json(capsys):
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["devices"]) == 8
    assert found["packages"]["jax"]


def test_env_as_text(capsys):
    assert cli.main(["env"]) == 0
    assert "8 x cpu" in capsys.readouterr().out


def test_json_has_no_nan():
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json({"loss": float("nan")})


def test_as_a_process(tmp_path):
    """Importing the entry point loads no model code; a closed pipe is no traceback."""
    program = os.path.join(os.path.dirname(sys.executable), "cam-jax")
    script = (
        "import sys, cam_jax.cli.main as m\n"
        "heavy = {'flax', 'orbax', 'optax', 'matplotlib', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    shell = f"{program!r} env | head -c 1"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "p"
    assert done.stderr == ""


def test_what_a_file_says_cannot_steer_the_terminal(command, capsys):
    def run(options):
        raise InputError("name \x1b[31m\x07 " + "x" * 10_000)

    command(run)
    assert cli.main(["try"]) == 2
    line = capsys.readouterr().err
    assert "\x1b" not in line and "\x07" not in line and len(line) < 5000


def test_flags_that_xla_would_abort_over_are_refused_first(command, capsys, monkeypatch):
    command(lambda options: 0)
    monkeypatch.setenv("XLA_FLAGS", "\u2013xla_force_host_platform_device_count=8")
    assert cli.main(["try"]) == 2
    assert "append to what the variable holds" in capsys.readouterr().err
