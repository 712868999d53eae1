"""Device meshes with the axes ("data", "expert", "tensor")."""

import os
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from cam_jax.errors import MeshError

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
        MeshError: a size below 1, or more devices than there are.
    """
    for axis, size in ((DATA, data), (EXPERT, expert), (TENSOR, tensor)):
        if size is None and axis == EXPERT:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MeshError(f"make_mesh: {axis}={size!r}, expected an integer of at least 1")
    found = list(jax.devices() if devices is None else devices)
    if expert is None:
        expert = max(len(found) // (data * tensor), 1)
    needed = data * expert * tensor
    if needed > len(found):
        raise MeshError(
            f"make_mesh: data={data} x expert={expert} x tensor={tensor} needs {needed} devices, "
            f"found {len(found)}: {_how_to_get_more(found)}"
        )
    return jax.make_mesh((data, expert, tensor), AXES, (AxisType.Auto,) * 3, devices=found[:needed])


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
    return int(mesh.shape[DATA] * mesh.shape[EXPERT])


def _how_to_get_more(found: list[jax.Device]) -> str:
    if found and found[0].platform != "cpu":
        return "use smaller sizes, or start more processes (jax.distributed)"
    flags = os.environ.get("XLA_FLAGS", "")
    asked = "xla_force_host_platform_device_count" in flags
    late = (
        " (XLA_FLAGS asks for another number: it was set after JAX had started, or is misspelt)"
        if asked
        else ""
    )
    return (
        "call jax.config.update('jax_num_cpu_devices', n) before anything else uses JAX, or append "
        f"--xla_force_host_platform_device_count=n to XLA_FLAGS before Python starts{late}"
    )
