"""What the processes of test_distributed.py run: `python -m tests.cam_jax.distributed_child`.

The options are those of every command, so this is also the one command line for any number of
processes.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import NamedSharding, PartitionSpec

from cam_jax import CapacityPolicy, ExpertWeights, MoEParams, RouterConfig, make_mesh, moe_layer
from cam_jax.distributed import Processes, Running, agree, fetch, is_main, start
from cam_jax.errors import DistributedError
from cam_jax.expert_parallel import param_specs

P = PartitionSpec
E, K, D, F, B, S = 8, 2, 8, 4, 5, 6


@dataclass(frozen=True, kw_only=True)
class Options:
    what: Literal["layer", "agree", "wait", "sum"] = "layer"
    """`layer`: the MoE layer; `agree`: compare shapes; `wait`: do nothing; `sum`: wait in one."""
    processes: Annotated[Processes, tyro.conf.arg(name="")] = field(default_factory=Processes)
    out: Path | None = None
    """Where process 0 writes what came out."""
    used: bool = False
    """Use JAX before the start."""
    rows: int = B
    """For `agree`."""
    victim: int = -1
    """Process that ends, a moment after all have computed something."""
    way: Literal["kill", "term", "raise", "thread", "exit", "return", "stop", "mismatch"] = "kill"
    """How it ends."""


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def parameters() -> MoEParams:
    experts = ExpertWeights(
        gate=jnp.asarray(numbers(1, E, F, D)),
        up=jnp.asarray(numbers(2, E, F, D)),
        down=jnp.asarray(numbers(3, E, D, F)),
    )
    return MoEParams(router=jnp.asarray(numbers(0, E, D)), experts=experts)


def layer(out: Path | None) -> None:
    """The layer over all the devices there are, in five policies, fetched to every process."""
    host = jax.tree.map(np.asarray, parameters())
    mesh = make_mesh()
    params = jax.tree.map(
        lambda leaf, spec: jax.make_array_from_callback(
            leaf.shape, NamedSharding(mesh, spec), lambda index: leaf[index]
        ),
        host,
        param_specs(host, tensor=False),
    )
    router = RouterConfig(num_experts=E, top_k=K, normalize=True)
    found = {}
    for name, policy in {
        "none": None,
        "score": CapacityPolicy(capacity_factor=0.8),
        "device": CapacityPolicy(capacity_factor=0.8, scope="device", expand=2),
        "batch": CapacityPolicy(capacity_factor=0.8, group="batch"),
        "fallback": CapacityPolicy(capacity_factor=0.8, overflow="fallback"),
    }.items():
        agree((policy, router, (B, S, D), mesh.shape), "the layer")

        @jax.jit
        def run(x, params, policy=policy):
            return moe_layer(x, params, router, policy, mesh=mesh)

        y, load = fetch(run(numbers(4, B, S, D) + 0.6 * host.router[0], params))
        found |= {f"{name}.{key}": value for key, value in {"y": y, **vars(load)}.items()}
    agree(found, "what came out")  # every byte, in every process
    if is_main() and out is not None:
        np.savez(out, **found)


def wait(me: Running, options: Options) -> None:
    """All compute a sum; one ends in its way; the others wait for it."""
    mesh = make_mesh()
    spread = NamedSharding(mesh, P("expert"))
    size = jax.device_count()
    x = jax.make_array_from_callback(
        (size,), spread, lambda i: np.arange(size, dtype=np.float32)[i]
    )
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))
    assert float(fetch(total(x))) == size * (size - 1) / 2
    print("ready", time.time())
    if me.process_id == options.victim:
        time.sleep(1)
        print("ends", time.time())
        die(options.way)
        if options.way == "return":
            return
    if options.what == "sum":
        fetch(total(x))
    while True:
        time.sleep(0.1)


def die(way: str) -> None:
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)
    elif way == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif way == "raise":
        raise ValueError("this process is broken")
    elif way == "exit":
        sys.exit(3)
    elif way == "mismatch":
        raise DistributedError("this process found something")
    elif way == "thread":
        threading.Thread(target=lambda: 1 // 0).start()
        time.sleep(100)


def main() -> None:
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))
    if options.used:
        jnp.zeros(3)
    with start(options.processes) as me:
        print("started", time.time())
        if options.what == "layer":
            layer(options.out)
        elif options.what == "agree":
            agree((options.rows, S), "the batch")
        else:
            wait(me, options)
    print("done", time.time())


if __name__ == "__main__":
    main()
