"""Meshes: their axes, their types, and what is said when one cannot be built."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from cam_jax import make_mesh
from cam_jax.errors import MeshError
from cam_jax.mesh import AXES, token_devices


def test_axes_and_types(devices):
    mesh = make_mesh(data=2, expert=2, tensor=2)
    assert dict(mesh.shape) == {"data": 2, "expert": 2, "tensor": 2}
    assert mesh.axis_names == AXES
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert token_devices(mesh) == 4


def test_the_expert_axis_takes_the_devices_that_are_left(devices):
    assert dict(make_mesh(tensor=2, devices=devices).shape) == {"data": 1, "expert": 4, "tensor": 2}
    assert make_mesh(data=1, expert=3).devices.size == 3


def test_too_many_devices_says_how_many_were_found_and_how_to_get_more(devices, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    with pytest.raises(MeshError, match=r"needs 16 devices, found 8.*jax_num_cpu_devices.*append"):
        make_mesh(expert=16, devices=devices)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--xla_force_host_platform_device_count=16", "asks for 16: it was set after JAX had"),
        ("--xla_force_host_platform_devices_count=16", "after JAX had started, and .* misspelt"),
        ("\u2013xla_force_host_platform_device_count=16", r"had started, and .*U\+2013"),
    ],
)
def test_flags_that_came_too_late_are_named(flags, said, devices, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(MeshError, match=said):
        make_mesh(expert=16)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("sizes", [{"data": 0}, {"expert": -1}, {"tensor": True}, {"data": 1.0}])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(MeshError, match=next(iter(sizes))):
        make_mesh(**sizes)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_mesh_is_refused():
    with pytest.raises(MeshError, match="mesh is a str"):
        token_devices("a")


def test_a_foreign_mesh_is_refused():
    with pytest.raises(MeshError, match="use cam_jax"):
        token_devices(jax.make_mesh((2,), ("x",), (AxisType.Auto,)))


def test_axes_that_are_not_auto_are_refused(devices):
    explicit = Mesh(np.array(devices).reshape(1, 8, 1), AXES, axis_types=(AxisType.Explicit,) * 3)
    with pytest.raises(MeshError, match=r"Explicit.*use cam_jax\.make_mesh"):
        token_devices(explicit)


@pytest.mark.usefixtures("unchecked")
def test_devices_that_are_none_are_refused(devices):
    for wrong in ("abc", 3, [1, 2]):
        with pytest.raises(MeshError, match="expected a list of JAX's devices"):
            make_mesh(devices=wrong)
    with pytest.raises(MeshError, match="named twice"):
        make_mesh(expert=2, devices=[devices[0]] * 2)


def test_a_torus_is_divided_where_no_whole_axis_fits(devices, monkeypatch):
    """JAX refuses tensor=2 on chips of 4x4x4; the devices are then ordered all the same."""

    def refuse(*args, **options):
        raise NotImplementedError("no physical axis of that size")

    monkeypatch.setattr(jax, "make_mesh", refuse)
    mesh = make_mesh(data=2, expert=2, tensor=2)
    assert dict(mesh.shape) == {"data": 2, "expert": 2, "tensor": 2}
    assert mesh.axis_names == AXES and mesh.axis_types == (AxisType.Auto,) * 3
    assert set(mesh.devices.flat) == set(devices)
