"""Directories that are complete or not there; what a killed call leaves is cleared away."""

import os
from pathlib import Path

import pytest

from cam_jax.conversion import staging
from cam_jax.conversion.staging import refuse_existing, staged
from cam_jax.errors import CheckpointError


def write(target: Path, text: str, *, overwrite: bool = False) -> None:
    with staged(target, overwrite=overwrite) as temporary:
        (temporary / "config.json").write_text(text)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "m"
    with staged(target, overwrite=False) as temporary:
        (temporary / "config.json").write_text("1")
        assert not target.exists() and temporary.parent == target.parent
    assert names(target.parent) == ["m"] and names(target) == ["config.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_after_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), staged(tmp_path / "m", overwrite=False):
        raise error
    assert names(tmp_path) == []


def test_leftovers_of_dead_calls_go_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    (tmp_path / ".m.0123.tmp" / "weights").mkdir(parents=True)
    (tmp_path / ".other.0123.tmp").mkdir()
    with staged(tmp_path / "m", overwrite=False) as running:
        write(tmp_path / "m2", "2")
        (tmp_path / ".m.4567.tmp").mkdir()
        with pytest.raises(CheckpointError), staged(tmp_path / "m", overwrite=False) as other:
            assert running.is_dir() and not (tmp_path / ".m.4567.tmp").exists()
            raise OSError("stop")
        assert not other.exists()
    assert names(tmp_path) == [".other.0123.tmp", "m", "m2"]


def test_half_a_replacement_is_undone(tmp_path: Path) -> None:
    write(tmp_path / "m", "old")
    (tmp_path / "m").rename(tmp_path / ".m.0123.old")
    with pytest.raises(CheckpointError, match="exists"):
        refuse_existing(tmp_path / "m", overwrite=False)
    assert (tmp_path / "m" / "config.json").read_text() == "old"
    (tmp_path / ".m.4567.old").mkdir()
    write(tmp_path / "m", "new", overwrite=True)
    assert names(tmp_path) == ["m"] and (tmp_path / "m" / "config.json").read_text() == "new"


def test_a_failed_replacement_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "m", "old")
    rename = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if self.suffix == ".tmp":
            raise OSError(5, os.strerror(5))
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path / "m", "new", overwrite=True)
    assert names(tmp_path) == ["m"] and (tmp_path / "m" / "config.json").read_text() == "old"


def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    refuse_existing(tmp_path / "m", overwrite=False)
    (tmp_path / "m" / "thesis.tex").touch()
    for overwrite, words in ((False, "exists"), (True, "left alone")):
        with pytest.raises(CheckpointError, match=words):
            refuse_existing(tmp_path / "m", overwrite=overwrite)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="left alone"):
        refuse_existing(tmp_path / "file", overwrite=True)


def test_without_locks_nothing_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "HAS_LOCKS", False)
    (tmp_path / ".m.0123.tmp").mkdir()
    write(tmp_path / "m", "1")
    assert names(tmp_path) == [".m.0123.tmp", "m"]
