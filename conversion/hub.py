"""From a path or a Hugging Face repo id to a directory on this machine."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from cam_jax.conversion.files import COMPANIONS, CONFIG
from cam_jax.conversion.paths import local_path
from cam_jax.conversion.source import INDEX, SINGLE, TORCH_INDEX, TORCH_SINGLE
from cam_jax.errors import CheckpointError

SMALL_FILES = (CONFIG, INDEX, TORCH_INDEX, *COMPANIONS)
WEIGHT_FILES = (SINGLE, "model-*-of-*.safetensors")
# Many repos hold their weights in both forms; these are fetched where there is no other.
TORCH_WEIGHT_FILES = (TORCH_SINGLE, "pytorch_model-*-of-*.bin")

_REPO_ID = re.compile(r"([A-Za-z0-9_.-]+/)?[A-Za-z0-9_.-]+")  # what the hub lets a name be made of


def resolve(
    path_or_repo_id: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    check: Callable[[Path], Any] | None = None,
) -> Path:
    """The directory of a checkpoint, downloaded first when a repo id is given.

    A path that exists is always a directory on this machine, whatever the hub may hold under that
    name. From the hub, config and tokenizer come first and `check` sees them before any weight is
    fetched. The token is huggingface_hub's own (HF_TOKEN or a stored login); HF_HUB_OFFLINE=1 and
    local_files_only read the cache only.

    Raises CheckpointError: no such path, unknown or closed repo or revision, network closed.
    """
    if not isinstance(path_or_repo_id, str | Path) or not str(path_or_repo_id):
        raise CheckpointError(f"{path_or_repo_id!r} is no path and no hub repo id.")
    text = str(path_or_repo_id)
    path = local_path(path_or_repo_id)
    if path.is_dir():
        return path.absolute()
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the directory that holds it.")
    if not _may_be_repo_id(text):
        raise CheckpointError(f"{text} is neither an existing directory nor a hub repo id.")

    def fetch(patterns: tuple[str, ...]) -> Path:
        try:
            return Path(
                huggingface_hub.snapshot_download(
                    text,
                    revision=revision,
                    cache_dir=cache_dir,
                    local_files_only=local_files_only,
                    allow_patterns=list(patterns),
                )
            )
        except Exception as error:
            raise CheckpointError(_explain(error, text, revision)) from error

    directory = fetch(SMALL_FILES)
    if check is not None:
        check(directory)
    directory = fetch(SMALL_FILES + WEIGHT_FILES)
    if not any((directory / name).is_file() for name in (SINGLE, INDEX)):
        directory = fetch(SMALL_FILES + TORCH_WEIGHT_FILES)
    return directory


def _may_be_repo_id(text: str) -> bool:
    if text.startswith((".", "~")):
        return False
    return _REPO_ID.fullmatch(text) is not None


def _explain(error: Exception, repo_id: str, revision: str | None) -> str:
    # The order matters: a gated repo counts as not found to huggingface_hub.
    if isinstance(error, GatedRepoError):
        return (
            f"hub repo {repo_id!r} is gated: accept its terms on its page, then set HF_TOKEN to a "
            "token of that account."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"hub repo {repo_id!r} has no revision {revision!r}."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{repo_id!r} is neither an existing directory nor a hub repo that can be seen "
            "(a private one needs HF_TOKEN)."
        )
    if isinstance(error, LocalEntryNotFoundError | ConnectionError):
        at = "" if revision is None else f" at revision {revision!r}"
        return (
            f"{repo_id!r} is no existing directory, is not in the local Hugging Face cache{at}, "
            "and the hub cannot be reached (closed network, or HF_HUB_OFFLINE / local_files_only). "
            "Download it where the network is open and give its directory."
        )
    return f"hub repo {repo_id!r} cannot be downloaded: {type(error).__name__}: {error}"
