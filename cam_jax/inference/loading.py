"""`cam_jax.load`: from a checkpoint directory or a hub id to a `LanguageModel`."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cam_jax.conversion.either import OpenAny, layout_of, load_any, open_any
from cam_jax.conversion.header import read_json
from cam_jax.conversion.orbax import OpenOrbax
from cam_jax.conversion.quantize import load_quantized
from cam_jax.errors import CheckpointError, ConfigError
from cam_jax.inference.language_model import LanguageModel
from cam_jax.inference.origin import Origin
from cam_jax.inference.policies import check_devices, check_policy
from cam_jax.inference.special import SpecialTokens
from cam_jax.xla_flags import backend_started, check_xla_flags


def load(
    path_or_repo_id: str | Path,
    *,
    policy: Any = None,
    mesh: Any = None,
    virtual_devices: Any = 1,
    dtype: Any = None,
    quantize: str | None = None,
    revision: str | None = None,
) -> LanguageModel:
    """Load a checkpoint, Hugging Face or Orbax. All but the weights is read and checked first.

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
        quantize: "int8" makes the routed experts int8 while they are read, a quarter of float32's
            bytes; ``lm.quantization`` says how far they are from the checkpoint's. None keeps them.
        revision: a branch, tag or commit of the hub.

    Raises:
        CheckpointError: the path, a file or a tensor is missing, truncated or does not fit.
        ConfigError: the configuration describes no known model, or an option is unknown.
        PolicyError: a policy that cannot hold for this model.
    """
    if quantize not in (None, "int8"):
        raise ConfigError(f"quantize={quantize!r}: expected 'int8', or None to keep the weights")
    if not backend_started():
        check_xla_flags()
    opened = open_any(path_or_repo_id, revision=revision)
    config = opened.config
    check_policy(policy, config.num_moe_layers)
    check_devices(config, mesh, virtual_devices)
    special = SpecialTokens.of(
        opened.config_json, _generation_config(opened), vocab_size=config.vocab_size
    )
    tokenizer = _tokenizer(opened)
    quantization = None
    if quantize is None:
        params = load_any(opened, mesh=mesh, dtype=dtype)
    elif isinstance(opened, OpenOrbax):
        raise ConfigError(
            "quantize reads Hugging Face checkpoints: load the one that this was converted from"
        )
    else:
        loaded = load_quantized(opened, mesh=mesh, dtype=dtype)
        config, params, quantization = loaded.config, loaded.params, loaded.report
    return LanguageModel(
        config=config,
        params=params,
        tokenizer=tokenizer,
        special=special,
        policy=policy,
        mesh=mesh,
        virtual_devices=virtual_devices,
        origin=Origin(
            config_json=opened.config_json,
            layout=layout_of(opened),
            companions=tuple(opened.companions.values()),
        ),
        quantization=quantization,
    )


def _generation_config(opened: OpenAny) -> dict[str, Any] | None:
    path = opened.companions.get("generation_config.json")
    if path is None:
        return None
    return read_json(path)


def _tokenizer(opened: OpenAny) -> Tokenizer | None:
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
