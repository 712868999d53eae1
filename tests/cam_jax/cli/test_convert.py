"""`cam-jax convert` and `cam-jax inspect`: clean output, exit codes, the bar on standard error."""

import io
import json
import signal
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cam_jax.cli import main as cli
from cam_jax.cli import progress
from cam_jax.conversion import streaming as module
from cam_jax.conversion.read import NonfiniteWarning
from tests.conversion.checkpoints import tiny_tensors, write_checkpoint


@pytest.fixture
def source(data_dir: Path) -> str:
    return str(data_dir / "checkpoints" / "mixtral_bf16_5x")


def test_there_back_and_described(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orbax, back = str(tmp_path / "o"), str(tmp_path / "h")
    assert cli.main(["convert", source, orbax, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["from"], found["to"], found["family"]) == ("hf", "orbax", "mixtral")
    assert found["bytes"] > 0 and found["peak_rss_bytes"] >= found["start_rss_bytes"]
    assert "converting" in err and "kB" in err
    assert cli.main(["convert", orbax, back, "--to", "hf", "--dtype", "float32"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and back in err
    assert cli.main(["inspect", back, "--json", "--tensor", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtypes"] == {"F32": found["parameters"]} and found["mesh"]["tensor"] == 2
    assert cli.main(["inspect", orbax, "--expert", "3"]) == 0
    out = capsys.readouterr().out
    assert "mixtral (orbax, experts stored per_expert)" in out and "dead experts" in out


def test_errors_come_without_a_bar(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", str(tmp_path), str(tmp_path / "o")]) == 2
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert cli.main(["inspect", source, "--expert", "99"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "converting" not in err
    assert [line.startswith("cam-jax: error:") for line in err.splitlines()] == [True] * 3


def test_weights_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = tiny_tensors()
    tensors["model.norm.weight"][0] = np.nan
    source = str(write_checkpoint(tmp_path / "a", tensors))
    target = tmp_path / "new" / "b"
    assert cli.main(["convert", source, str(target)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("cam-jax: error: weights that are not finite")
    assert "--allow-nonfinite" in err and not target.parent.exists()
    with pytest.warns(NonfiniteWarning):
        assert cli.main(["convert", source, str(target), "--allow-nonfinite"]) == 0


def test_interrupted(
    source: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save = module.save_orbax

    def interrupted(*args: object, **kwargs: object) -> object:
        kwargs["progress"] = lambda done, total: done and signal.raise_signal(signal.SIGINT)
        return save(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "save_orbax", interrupted)
    assert cli.main(["convert", source, str(tmp_path / "o")]) == 130
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == "cam-jax: interrupted\n"


def test_bar_tells_bytes_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.byte_bar("reading") as update:
        assert capsys.readouterr().err == ""
        update(0, 2_000_000)
        update(1_000_000, 2_000_000)
    err = capsys.readouterr().err
    assert err.count("reading") == 1 and "1.0/2.0 MB" in err and "left" in err


@pytest.mark.parametrize("calls", [0, 1])
def test_nothing_of_a_bar_stays_on_a_terminal(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, force_interactive=True, width=80)
    monkeypatch.setattr(progress, "messages", lambda: console)
    with pytest.raises(ValueError, match="stop"), progress.byte_bar("reading") as update:
        for _ in range(calls):
            update(0, 2_000_000)
        raise ValueError("stop")
    assert ("reading" in text.getvalue()) == bool(calls)
    # The last thing that is written takes the line away.
    assert text.getvalue().endswith("\x1b[2K" if calls else "")
