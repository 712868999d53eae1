"""`cam-jax env`: what a bug report should say about the machine."""

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

from cam_jax.cli.console import write_json

PACKAGES = (
    "cam-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "libtpu",
    "torch",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    json: bool = False
    """Write JSON."""


def environment() -> dict[str, Any]:
    """Versions of Python and of the main packages (None: not installed), and JAX's devices."""
    import jax

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run(options: Options) -> None:
    found = environment()
    if options.json:
        write_json(found)
        return
    for name in ("python", "platform"):
        print(f"{name:18}{found[name]}")
    for name, version in found["packages"].items():
        print(f"{name:18}{version or '-'}")
    kinds = ", ".join(sorted(set(found["devices"])))
    print(f"{'backend':18}{found['backend']}, {len(found['devices'])} x {kinds}")
    print(f"{'processes':18}{found['processes']}")
