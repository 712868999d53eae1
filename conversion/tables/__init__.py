"""Weight tables by model_type: the names that Hugging Face checkpoints use, one file per family."""

from cam_jax.conversion.tables import olmoe
from cam_jax.conversion.tables.table import Ignored, Piece, Rule, WeightTable
from cam_jax.errors import ConfigError

TABLES: dict[str, WeightTable] = {"olmoe": olmoe.TABLE}


def table_for(model_type: str) -> WeightTable:
    """The table of a family. Raises ConfigError, listing the known ones, when there is none."""
    if model_type not in TABLES:
        raise ConfigError(
            f"no weight table for model_type {model_type!r}; known: {', '.join(sorted(TABLES))}."
        )
    return TABLES[model_type]


__all__ = ["TABLES", "Ignored", "Piece", "Rule", "WeightTable", "table_for"]
