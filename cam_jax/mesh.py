"""Device meshes with the axes ("data", "expert", "tensor")."""

import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh

from cam_jax.errors import MeshError
from cam_jax.xla_flags import (
    DEVICE_COUNT,
    backend_started,
    check_xla_flags,
    forced_devices,
    problem_of,
)

DATA, EXPERT, TENSOR = "data", "expert", "tensor"
AXES = (DATA, EXPERT, TENSOR)
# Sequences are divided over both: every device of an expert-parallel group holds tokens of its own.
TOKENS = (DATA, EXPERT)


def make_mesh(
    *,
    data: int = 1,
    expert: int | None = None,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of data x expert x tensor devices, with Auto axes.

    Args:
        data: copies of the experts, each with sequences of its own.
        expert: devices that share the experts out; None: all the devices that are left.
        tensor: devices that share each expert, each attention head group and the vocabulary.
        devices: which ones, in mesh order; None: those JAX finds, the first as many as needed.

    Raises:
        MeshError: a size below 1, more devices than there are, or `XLA_FLAGS` that XLA would end
            the process over.
    """
    for axis, size in ((DATA, data), (EXPERT, expert), (TENSOR, tensor)):
        if size is None and axis == EXPERT:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MeshError(f"make_mesh: {axis}={size!r}, expected an integer of at least 1")
    if devices is None and not backend_started():
        check_xla_flags()
    found = _devices(devices)
    if expert is None:
        expert = max(len(found) // (data * tensor), 1)
    needed = data * expert * tensor
    if needed > len(found):
        raise MeshError(
            f"make_mesh: data={data} x expert={expert} x tensor={tensor} needs {needed} devices, "
            f"found {len(found)}: {_how_to_get_more(found)}"
        )
    shape, devices, types = (data, expert, tensor), found[:needed], (AxisType.Auto,) * 3
    try:
        return jax.make_mesh(shape, AXES, types, devices=devices)
    except NotImplementedError:
        # No axis of the mesh is whole axes of the chips' torus: divide those.
        order = create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(order, AXES, axis_types=types)


def _devices(devices: Any) -> list[jax.Device]:
    found = jax.devices() if devices is None else devices
    if not isinstance(found, Sequence) or not all(isinstance(d, jax.Device) for d in found):
        raise MeshError(f"make_mesh: devices={devices!r}, expected a list of JAX's devices")
    if len(set(found)) < len(found):
        raise MeshError("make_mesh: a device is named twice")
    return list(found)


def token_devices(mesh: Mesh) -> int:
    """Devices that hold different tokens: data x expert.

    Raises:
        MeshError: not a mesh of `make_mesh`.
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh is a {type(mesh).__name__}: use cam_jax.make_mesh")
    if tuple(mesh.axis_names) != AXES:
        raise MeshError(
            f"the mesh has axes {tuple(mesh.axis_names)}, expected {AXES}: use cam_jax.make_mesh"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise MeshError(
            f"the mesh has axis types {tuple(kind.name for kind in mesh.axis_types)}, expected "
            "Auto: use cam_jax.make_mesh (jax.make_mesh makes Explicit axes unless told otherwise)"
        )
    return int(mesh.shape[DATA] * mesh.shape[EXPERT])


def _how_to_get_more(found: list[jax.Device]) -> str:
    if found and found[0].platform != "cpu":
        return (
            f"use smaller sizes, or start more processes than {jax.process_count()} "
            "(cam_jax.distributed)"
        )
    return (
        "call jax.config.update('jax_num_cpu_devices', n) before anything else uses JAX (on the "
        "command line --cpu-devices n), or append "
        f"{DEVICE_COUNT}=n to XLA_FLAGS (do not replace what it holds) before Python starts"
        f"{_why_not_from_xla_flags(len(found))}"
    )


def _why_not_from_xla_flags(found: int) -> str:
    """What `XLA_FLAGS` asks for, where that is not what there is."""
    flags = os.environ.get("XLA_FLAGS", "")
    problem, asked = problem_of(flags), forced_devices(flags)
    if problem is not None:
        return f" (XLA_FLAGS was set after JAX had started, and {problem})"
    if asked is None or asked == found:
        return ""
    return (
        f" (XLA_FLAGS asks for {asked}: it was set after JAX had started, or "
        "jax_num_cpu_devices, which comes first, was set too)"
    )
