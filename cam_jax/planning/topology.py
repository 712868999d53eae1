"""Topologies by name: "v5e:4x4" is a slice of a TPU pod, "cpu:8" the CPU devices of this process.

A slice needs no hardware: libtpu describes it, and compiles for it, on any Linux machine.
"""

import importlib.util
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
from jax.experimental import topologies

from cam_jax.errors import ConfigError, DependencyError, MeshError
from cam_jax.planning.chips import CHIPS, Chip

CPU = "cpu"

# libtpu asks the metadata server of the machine for these, and waits for one that is not there.
_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
)

# Chips of one pod, as in `chips`' sources; of CPU devices, more than anybody compiles for.
_LARGEST = MappingProxyType({"v4": 4096, "v5e": 256, "v5p": 8960, "v6e": 256, CPU: 1024})

# How the cloud calls a slice: generation, then its number of cores (v4, v5p) or chips.
_ACCELERATOR = MappingProxyType(
    {"v4": ("v4", 2), "v5e": ("v5litepod", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1)}
)


@dataclass(frozen=True, kw_only=True)
class TopologyName:
    """A name that has been read, before anything is loaded.

    Attributes:
        name: as it was given.
        kind: "cpu" or the chip's generation.
        shape: chips along each dimension.
    """

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        """How many chips there are."""
        return math.prod(self.shape)

    @property
    def chip(self) -> Chip | None:
        """What one chip can do; None for a CPU, of which nothing is known."""
        return CHIPS.get(self.kind)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices to compile for.

    Attributes:
        name: what was asked for.
        devices: one per chip.
    """

    name: TopologyName
    devices: tuple[jax.Device, ...]

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Per dimension, whether its last chip is linked to its first."""
        chip = self.name.chip
        return tuple(chip is not None and size >= chip.wrap for size in self.name.shape)


def read_topology(name: str) -> TopologyName:
    """What a topology's name says; loads nothing.

    Raises:
        ConfigError: an unknown chip, or a shape that is none or has another number of dimensions.
    """
    known = ", ".join((*CHIPS, CPU))
    example = "for example v5e:4x4, v5p:4x4x4 or cpu:8"
    kind, _, sizes = name.partition(":")
    if kind not in CHIPS and kind != CPU:
        raise ConfigError(
            f"topology {name!r}: unknown chip {kind!r}, expected one of {known}, {example}"
        )
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", sizes):
        raise ConfigError(
            f"topology {name!r}: expected CHIP:AxB with sizes of at least 1, {example}"
        )
    shape = tuple(int(size) for size in sizes.split("x"))
    if kind in CHIPS and len(shape) != CHIPS[kind].dimensions:
        raise ConfigError(
            f"topology {name!r} has {len(shape)} dimensions, {kind} pods have "
            f"{CHIPS[kind].dimensions}: {example}"
        )
    largest = _LARGEST[kind]
    if math.prod(shape) > largest:
        raise ConfigError(
            f"topology {name!r} has {math.prod(shape)} devices: {kind} has at most {largest}"
        )
    return TopologyName(name=name, kind=kind, shape=shape)


def open_topology(name: TopologyName) -> Topology:
    """The devices of a topology.

    Raises:
        DependencyError: a TPU's without libtpu.
        MeshError: more CPU devices than this process has, or a slice that libtpu refuses.
    """
    if name.kind == CPU:
        found = jax.devices(CPU)
        if name.chips > len(found):
            raise MeshError(
                f"topology {name.name!r} needs {name.chips} CPU devices, this process has "
                f"{len(found)}: append --xla_force_host_platform_device_count={name.chips} to "
                "XLA_FLAGS before Python starts"
            )
        return Topology(name=name, devices=tuple(found[: name.chips]))
    if importlib.util.find_spec("libtpu") is None:
        raise DependencyError(
            f"topology {name.name!r}: compiling for a TPU needs libtpu, which is not installed: "
            'pip install "cam-jax[tpu-plan]" (Linux; no TPU is needed)'
        )
    _prepare_environment(name)
    # A v4 chip is two devices unless asked for as one.
    options = {"chip_config_name": "megacore"} if name.kind == "v4" else {}
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=name.name, **options
        ).devices
    except Exception as error:
        # Whatever libtpu raises is a plain RuntimeError of some kind, with its own reason.
        if "lockfile" in str(error):
            raise MeshError(
                f"topology {name.name!r}: another process uses libtpu: wait for it, or set "
                "ALLOW_MULTIPLE_LIBTPU_LOAD=1 in the environment"
            ) from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MeshError(f"libtpu has no topology {name.name!r}: {reason}") from error
    if len(found) != name.chips:
        raise MeshError(
            f"topology {name.name!r} has {name.chips} chips, but libtpu shows {len(found)} devices"
        )
    return Topology(name=name, devices=tuple(found))


def _prepare_environment(name: TopologyName) -> None:
    """Before libtpu is loaded; what the user has set stays."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    accelerator, cores = _ACCELERATOR[name.kind]
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{accelerator}-{name.chips * cores}")


def coordinates(device: jax.Device) -> tuple[int, ...] | None:
    """Where a chip stands in its pod; None for a CPU."""
    found = getattr(device, "coords", None)
    return None if found is None else tuple(found)
