"""What every test runs under: eight CPU devices, checked annotations, reproducible examples.

Environment:
    JAX_PLATFORMS: another platform than "cpu"; tests that need eight devices then fail.
    CAM_JAX_EXAMPLES: examples of each property test, drawn anew on each run (default: a fixed few).
"""

import os
from collections.abc import Iterator
from pathlib import Path

# Before JAX is imported; tests that start another process pass these on to it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test never reaches for the network
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tests are parallel already
# Nearly all of the time goes into compiling programs that run once: machine code that is not
# optimised, of the same compiled program, saves a third of it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis
import jax
import jaxtyping
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# Annotations of the whole package are checked at run time. Before the first import of cam_jax.
jaxtyping.install_import_hook("cam_jax", "beartype.beartype")

hypothesis.settings.register_profile(
    "fast",
    max_examples=15,
    derandomize=True,
    database=None,
    deadline=None,  # an example may compile
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "search",
    hypothesis.settings.get_profile("fast"),
    max_examples=int(os.environ.get("CAM_JAX_EXAMPLES", "200")),
    derandomize=False,
    print_blob=True,
)
hypothesis.settings.load_profile("search" if "CAM_JAX_EXAMPLES" in os.environ else "fast")


@pytest.fixture
def rng() -> np.random.Generator:
    """Seeded numbers for tests that need some and do not care which."""
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The eight CPU devices that a mesh can be made of."""
    found = jax.devices()
    assert len(found) >= 8, f"the tests need eight devices, JAX was started with {len(found)}"
    return found[:8]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """tests/data: golden cases and tiny checkpoints."""
    return Path(__file__).parent / "data"


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Arguments of a wrong type reach the library, whose own error a test wants to see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
