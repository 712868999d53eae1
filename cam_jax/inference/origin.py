"""What a loaded model remembers of its checkpoint, so that it can be written again."""

import dataclasses
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model came from.

    Attributes:
        config_json: the checkpoint's config.json.
        layout: how it stores experts ("per_expert" or "fused").
        companions: tokenizer and generation files that travel along.
    """

    config_json: dict[str, Any]
    layout: str
    companions: tuple[Path, ...] = ()
