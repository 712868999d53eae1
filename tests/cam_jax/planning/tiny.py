"""A small model and jobs for the tests of planning."""

import dataclasses
from typing import Any

import jax

from cam_jax.models.config import DecoderConfig
from cam_jax.models.registry import read_config
from cam_jax.planning.compile import Job
from cam_jax.planning.layout import MeshSizes, build_mesh
from cam_jax.planning.topology import Topology, read_topology

LAYERS = 3

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def config(**changes: Any) -> DecoderConfig:
    """The small Mixtral, some fields of its config.json changed."""
    return read_config({**MIXTRAL, **changes})


def cpu_topology(devices: list[jax.Device], name: str = "cpu:2x4") -> Topology:
    return Topology(name=read_topology(name), devices=tuple(devices))


def job(topology: Topology, sizes: MeshSizes, **changes: Any) -> Job:
    """Two sequences of 16 tokens for each device that holds tokens."""
    built = Job(
        config=config(),
        mesh=build_mesh(sizes, topology),
        batch=2 * sizes.token_devices,
        length=16,
        new_tokens=8,
        dtype="bfloat16",
    )
    return dataclasses.replace(built, **changes)
