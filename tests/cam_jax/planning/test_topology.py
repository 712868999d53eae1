"""Names of topologies, and what is said when something is missing."""

import importlib.util

import pytest

from cam_jax.errors import ConfigError, DependencyError, MeshError
from cam_jax.planning import topology
from cam_jax.planning.topology import Topology, open_topology, read_topology


@pytest.mark.parametrize(
    ("name", "kind", "shape", "chips"),
    [
        ("v5e:4x4", "v5e", (4, 4), 16),
        ("v5p:4x4x4", "v5p", (4, 4, 4), 64),
        ("v6e:16x16", "v6e", (16, 16), 256),
        ("cpu:8", "cpu", (8,), 8),
        ("cpu:2x4", "cpu", (2, 4), 8),
    ],
)
def test_names(name, kind, shape, chips):
    found = read_topology(name)
    assert (found.kind, found.shape, found.chips) == (kind, shape, chips)
    assert (found.chip is None) == (kind == "cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5:4x4", "unknown chip 'v5', expected one of v4, v5e, v5p, v6e, cpu"),
        ("", "unknown chip ''"),
        ("4x4", "unknown chip '4x4'"),
        ("v5e", "expected CHIP:AxB"),
        ("v5e:4x", "expected CHIP:AxB"),
        ("v5e:0x4", "expected CHIP:AxB"),
        ("v5e:4×4", "expected CHIP:AxB"),
        ("v5e:4x4x4", "has 3 dimensions, v5e pods have 2"),
        ("v5p:4x4", "has 2 dimensions, v5p pods have 3"),
    ],
)
def test_misspelt_names(name, message):
    with pytest.raises(ConfigError, match=message):
        read_topology(name)


def test_too_few_cpu_devices():
    with pytest.raises(MeshError, match=r"needs 999 CPU devices.*device_count=999"):
        open_topology(read_topology("cpu:999"))


def test_without_libtpu_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r'pip install "cam-jax\[tpu-plan\]"'):
        open_topology(read_topology("v5e:4x4"))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "INVALID_ARGUMENT: not divisible by the chips of a host\nmore",
            "no topology 'v5e:3x3': INVALID_ARGUMENT: not divisible by the chips of a host$",
        ),
        (
            "ABORTED: Internal error when accessing libtpu multi-process lockfile.",
            "another process uses libtpu: wait for it, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1",
        ),
    ],
)
def test_what_libtpu_refuses_is_a_mesh_error(monkeypatch, said, message):
    def refuse(**options):
        raise RuntimeError(said)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(topology.topologies, "get_topology_desc", refuse)
    for key in ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    with pytest.raises(MeshError, match=message):
        open_topology(read_topology("v5e:3x3"))
    assert topology.os.environ["TPU_ACCELERATOR_TYPE"] == "v5litepod-9"
    assert topology.os.environ["TPU_SKIP_MDS_QUERY"] == "1"
    assert topology.os.environ["TPU_WORKER_HOSTNAMES"] == "mine"  # the user's stays


@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v5e:4x16", (False, True)),
        ("v5p:4x4x4", (True, True, True)),
        ("v5p:2x2x4", (False, False, True)),
        ("cpu:8", (False,)),
    ],
)
def test_rings(name, wraps):
    assert Topology(name=read_topology(name), devices=()).wraps == wraps
