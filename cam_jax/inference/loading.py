"""`cam_jax.load`: from a checkpoint directory or a hub id to a `LanguageModel`."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cam_jax.conversion import load_params, open_checkpoint
from cam_jax.conversion.header import read_json
from cam_jax.conversion.load import OpenCheckpoint
from cam_jax.errors import CheckpointError
from cam_jax.inference.language_model import LanguageModel
from cam_jax.inference.origin import Origin
from cam_jax.inference.policies import check_devices, check_policy
from cam_jax.inference.special import SpecialTokens


def load(
    path_or_repo_id: str | Path,
    *,
    policy: Any = None,
    mesh: Any = None,
    virtual_devices: Any = 1,
    dtype: Any = None,
    revision: str | None = None,
) -> LanguageModel:
    """Load a Hugging Face checkpoint. Everything but the weights is read and checked first.

    Args:
        path_or_repo_id: a directory, or the id of a model on the Hugging Face hub.
        policy: a CapacityPolicy, None (no ceiling: the model as trained), or a tuple with one per
            MoE layer.
        mesh: of `cam_jax.make_mesh`: every device gets, and every process reads, its own part of
            the weights; None = one device.
        virtual_devices: without a mesh, the number of expert-parallel devices whose groups one
            device emulates, or a pair (data, expert).
        dtype: of the weights and the arithmetic ("float32", "bfloat16", ...); None keeps the
            checkpoint's. Router logits and output logits are float32 in any case.
        revision: a branch, tag or commit of the hub.

    Raises:
        CheckpointError: the path, a file or a tensor is missing, truncated or does not fit.
        ConfigError: the configuration describes no known model.
        PolicyError: a policy that cannot hold for this model.
    """
    opened = open_checkpoint(path_or_repo_id, revision=revision)
    config = opened.config
    check_policy(policy, config.num_moe_layers)
    check_devices(config, mesh, virtual_devices)
    special = SpecialTokens.of(
        opened.config_json, _generation_config(opened), vocab_size=config.vocab_size
    )
    tokenizer = _tokenizer(opened)
    return LanguageModel(
        config=config,
        params=load_params(opened, mesh=mesh, dtype=dtype),
        tokenizer=tokenizer,
        special=special,
        policy=policy,
        mesh=mesh,
        virtual_devices=virtual_devices,
        origin=Origin(
            config_json=opened.config_json,
            layout=opened.plan.layout,
            companions=tuple(opened.companions.values()),
        ),
    )


def _generation_config(opened: OpenCheckpoint) -> dict[str, Any] | None:
    path = opened.companions.get("generation_config.json")
    if path is None:
        return None
    return read_json(path)


def _tokenizer(opened: OpenCheckpoint) -> Tokenizer | None:
    path = opened.companions.get("tokenizer.json")
    if path is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The package raises plain Exception for whatever is wrong with the file.
    except Exception as error:
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
    # Files may carry the settings of someone's training run; a prompt is never cut or filled
    # silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
