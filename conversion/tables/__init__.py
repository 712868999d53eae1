"""Weight tables by model_type: the names that Hugging Face checkpoints use."""

from cam_jax.conversion.tables import deepseek, mixtral, olmoe, qwen
from cam_jax.conversion.tables.table import Ignored, Piece, Rule, WeightTable
from cam_jax.errors import ConfigError

TABLES: dict[str, WeightTable] = {
    table.family: table
    for table in (
        olmoe.TABLE,
        mixtral.TABLE,
        qwen.QWEN2_MOE,
        qwen.QWEN3_MOE,
        deepseek.DEEPSEEK,
        deepseek.DEEPSEEK_V2,
        deepseek.DEEPSEEK_V3,
    )
}


def table_for(model_type: str) -> WeightTable:
    """The table of a family. Raises ConfigError, listing the known ones, when there is none."""
    if model_type not in TABLES:
        raise ConfigError(
            f"no weight table for model_type {model_type!r}; known: {', '.join(sorted(TABLES))}."
        )
    return TABLES[model_type]


__all__ = ["TABLES", "Ignored", "Piece", "Rule", "WeightTable", "table_for"]
