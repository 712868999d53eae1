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
    (tmp_path / ".m.01234567.tmp" / "weights").mkdir(parents=True)
    # Of other targets, whose names begin alike, and of nobody here.
    others = [".m.5.01234567.tmp", ".m.notes.tmp", ".other.01234567.tmp"]
    for name in others:
        (tmp_path / name).mkdir()
    with staged(tmp_path / "m", overwrite=False) as running:
        write(tmp_path / "m2", "2")
        (tmp_path / ".m.456789ab.tmp").mkdir()
        with pytest.raises(CheckpointError), staged(tmp_path / "m", overwrite=False) as other:
            assert running.is_dir() and not (tmp_path / ".m.456789ab.tmp").exists()
            raise OSError("stop")
        assert not other.exists()
    assert names(tmp_path) == [*others, "m", "m2"]


def test_half_a_replacement_is_undone(tmp_path: Path) -> None:
    write(tmp_path / "m", "old")
    (tmp_path / "m").rename(tmp_path / ".m.01234567.old")
    with pytest.raises(CheckpointError, match="exists"):
        refuse_existing(tmp_path / "m", overwrite=False)
    assert (tmp_path / "m" / "config.json").read_text() == "old"
    for name in (".m.456789ab.old", ".m.5.456789ab.old"):
        (tmp_path / name).mkdir()
    write(tmp_path / "m", "new", overwrite=True)
    assert (
        names(tmp_path) == [".m.5.456789ab.old", "m"]
        and (tmp_path / "m" / "config.json").read_text() == "new"
    )


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
    (tmp_path / ".m.01234567.tmp").mkdir()
    write(tmp_path / "m", "1")
    assert names(tmp_path) == [".m.01234567.tmp", "m"]


def test_another_names_leftover_is_not_brought_back(tmp_path: Path) -> None:
    (tmp_path / ".m.5.01234567.old").mkdir()
    refuse_existing(tmp_path / "m", overwrite=False)
    assert names(tmp_path) == [".m.5.01234567.old"]


def test_a_leftover_that_cannot_be_moved_back_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".m.01234567.old").mkdir()

    def fail(self: Path, to: Path) -> Path:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match=r"\.m\.01234567\.old.*cannot be moved back"):
        refuse_existing(tmp_path / "m", overwrite=False)


def test_parents_that_were_made_go_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with (
        pytest.raises(CheckpointError),
        staged(tmp_path / "there" / "a" / "b" / "m", overwrite=False),
    ):
        (tmp_path / "there" / "a" / "in_use").touch()
        raise OSError("stop")
    assert names(tmp_path / "there") == ["a"] and names(tmp_path / "there" / "a") == ["in_use"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    target = tmp_path / "m"
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "mixtral"}')
    return target


KNOWN = [
    *("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"),
    *("generation_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("README.md", "LICENSE", "LICENSE-MODEL", ".gitattributes", "modeling_deepseek.py"),
]


def test_everything_that_checkpoints_hold_is_replaced(checkpoint: Path) -> None:
    for name in KNOWN:
        (checkpoint / name).touch()
    (checkpoint / ".cache" / "huggingface").mkdir(parents=True)
    refuse_existing(checkpoint, overwrite=True)
    (checkpoint / "cam_jax.json").touch()
    (checkpoint / "weights" / "00000").mkdir(parents=True)
    refuse_existing(checkpoint, overwrite=True)


@pytest.mark.parametrize(
    "name",
    [
        "a.py",
        "src/",
        "weights/",
        "model.safetensors/",
        "checkpoint.bin",
        ".git/",
        "tokenizer.json~",
    ],
)
def test_what_is_not_of_a_checkpoint_is_kept(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    path.mkdir() if name.endswith("/") else path.touch()
    with pytest.raises(CheckpointError, match=f"'{name.rstrip('/')}'.*left alone"):
        refuse_existing(checkpoint, overwrite=True)
    assert path.exists()


def test_up_to_three_are_named(checkpoint: Path) -> None:
    for number in range(5):
        (checkpoint / f"{number}.txt").touch()
    with pytest.raises(CheckpointError, match=r"'0\.txt', '1\.txt', '2\.txt' and 2 more"):
        refuse_existing(checkpoint, overwrite=True)


def test_notes_among_the_weights_are_kept(checkpoint: Path) -> None:
    (checkpoint / "cam_jax.json").touch()
    (checkpoint / "weights" / "notes").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"'weights'.*left alone"):
        refuse_existing(checkpoint, overwrite=True)


@pytest.mark.parametrize("text", ["{}", "[]", "x", '{"model_type": "gpt2"}', '{"name": "site"}'])
def test_config_json_of_something_else(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"not a checkpoint of a known model.*left alone"):
        refuse_existing(checkpoint, overwrite=True)


def test_companions_of_the_old_directory(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("metrics.json", "tokenizer.json"):
        (tmp_path / name).touch()
        (checkpoint / name).touch()
    # The new directory gets a file of this name, so the old one may go.
    refuse_existing(checkpoint, True, [tmp_path / "metrics.json"])
    (tmp_path / "link").symlink_to(checkpoint / "tokenizer.json")
    for inside in (checkpoint / "tokenizer.json", tmp_path / "link"):
        with pytest.raises(CheckpointError, match="is to be copied, but lies in"):
            refuse_existing(checkpoint, True, [inside, tmp_path / "metrics.json"])
