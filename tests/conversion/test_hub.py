"""Paths and repo ids: a directory always wins, and a closed network is said plainly."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from cam_jax.conversion import load_checkpoint, open_checkpoint
from cam_jax.conversion.hub import resolve
from cam_jax.errors import CheckpointError, ConfigError
from tests.conversion.checkpoints import tiny_config, tiny_tensors, write_checkpoint, write_config


def fails_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def snapshot_download(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def message(repo_id: str, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(repo_id, **options)
    assert repo_id in str(caught.value)
    return str(caught.value)


def http_error(kind: type[Exception]) -> Exception:
    """An error of huggingface_hub without the response that its constructor asks for."""
    return kind.__new__(kind)


def test_existing_directory_wins_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_with(monkeypatch, AssertionError("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "owner" / "name", tiny_tensors())
    assert resolve("owner/name") == tmp_path / "owner" / "name"
    assert load_checkpoint("owner/name", revision="main").layout == "per_expert"
    assert resolve(tmp_path / "owner" / "name") == tmp_path / "owner" / "name"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert resolve("~/m") == tmp_path / "m"


@pytest.mark.parametrize("text", ["./absent", "/absent/model", "~/absent", "a/b/c", "bad name"])
def test_what_can_only_be_a_path(
    monkeypatch: pytest.MonkeyPatch, text: str, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    fails_with(monkeypatch, AssertionError("the hub was asked"))
    assert "neither an existing directory" in message(text)


def test_file_instead_of_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "is a file" in message(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (http_error(errors.GatedRepoError), "gated"),
        (http_error(errors.RepositoryNotFoundError), "neither an existing directory"),
        (http_error(errors.RevisionNotFoundError), "no revision 'v9'"),
        (errors.LocalEntryNotFoundError("x"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("x"), "cannot be reached"),
        (ConnectionRefusedError(111, "Connection refused"), "cannot be reached"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("something else"), "RuntimeError: something else"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_failure_is_explained(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    fails_with(monkeypatch, error)
    assert words in message("owner/name", revision="v9")


def test_closed_network_for_real(tmp_path: Path) -> None:
    """Through huggingface_hub itself, which the tests run offline (conftest)."""
    assert "cannot be reached" in message("owner/absent", cache_dir=tmp_path)
    assert "cannot be reached" in message("owner/x", cache_dir=tmp_path, local_files_only=True)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache as huggingface_hub lays it out, with one repo in it."""
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    write_checkpoint(snapshot, tiny_tensors(), shards=2)
    (snapshot / "tokenizer.json").write_text("{}")
    (repository / "blobs").mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(repository / "blobs" / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return tmp_path


@pytest.mark.parametrize("revision", [None, "main", "0" * 40])
def test_offline_cache_loads(cache: Path, revision: str | None) -> None:
    opened = open_checkpoint("owner/name", cache_dir=cache, revision=revision)
    assert opened.directory.name == "0" * 40
    assert list(opened.companions) == ["tokenizer.json"]
    assert "cannot be reached" in message("owner/name", cache_dir=cache, revision="other")


def test_unknown_model_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, tiny_config(model_type="gpt2"))
    asked: list[list[str]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], **kwargs: Any) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match="gpt2"):
        open_checkpoint("owner/name")
    assert len(asked) == 1 and not any("safetensors" in p for p in asked[0] if "index" not in p)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("nothing", ["", None, 5, b"abc"])
def test_no_path_at_all_is_refused(nothing: Any) -> None:
    with pytest.raises(CheckpointError, match="no path and no hub repo id"):
        resolve(nothing)


@pytest.mark.parametrize("safetensors", [True, False])
def test_bin_files_are_fetched_where_there_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safetensors: bool
) -> None:
    write_config(tmp_path, tiny_config())
    if safetensors:
        (tmp_path / "model.safetensors").touch()
    asked: list[str] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], **kwargs: Any) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("owner/name") == tmp_path
    assert ("pytorch_model.bin" in asked) == (not safetensors)
