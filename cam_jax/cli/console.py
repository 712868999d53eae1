"""Where a command writes: results to standard output, everything else to standard error."""

import json
import sys
from typing import Any

from rich.console import Console


def messages() -> Console:
    """For progress and remarks: standard error, so that standard output stays clean."""
    return Console(stderr=True)


def write_json(data: Any) -> None:
    """Write one JSON document, and nothing else, to standard output.

    Raises:
        ValueError: a number is NaN or infinite, which JSON does not know.
    """
    json.dump(data, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
