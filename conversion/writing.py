"""What every writer of checkpoints shares: leaves that fit, config.json that says their type."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cam_jax.conversion.arrays import NAMES, WEIGHT_DTYPES
from cam_jax.errors import CheckpointError
from cam_jax.models.quantization import without_quantization

_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_leaves(
    shapes: Mapping[str, tuple[int, ...]], leaves: Mapping[str, Any]
) -> dict[str, np.dtype]:
    faults = [f"{leaf} is missing" for leaf in shapes if leaf not in leaves]
    faults += [f"{leaf} is left over" for leaf in leaves if leaf not in shapes]
    dtypes = {}
    for leaf, shape in shapes.items():
        if leaf not in leaves:
            continue
        array = leaves[leaf]
        dtypes[leaf] = np.dtype(array.dtype)
        if tuple(array.shape) != shape:
            faults.append(f"{leaf} is {list(array.shape)}, the config gives {list(shape)}")
        if NAMES.get(dtypes[leaf]) not in WEIGHT_DTYPES:
            faults.append(f"{leaf} is {dtypes[leaf]}, not a float type of safetensors")
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(f"leaves do not fit the config: {'; '.join(faults[:8])}{more}.")
    return dtypes


def written_config(
    config_json: Mapping[str, Any], dtypes: Mapping[str, np.dtype]
) -> dict[str, Any]:
    """config_json for plain numbers: no quantization, and a type field, if there is one, that names
    the type of all leaves."""
    config = without_quantization(config_json)
    kinds = {NAMES[dtype] for dtype in dtypes.values()}
    if len(kinds) == 1:
        for field in ("dtype", "torch_dtype"):
            if config.get(field) is not None:
                config[field] = _TORCH_NAMES[kinds.pop()]
                break
    return config


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
