"""Typed errors: each says what was wrong, where, and what to do about it."""


class CamError(Exception):
    """Base of every error that cam_jax raises on purpose."""


class PolicyError(CamError, ValueError):
    """A capacity policy, router or routing option that cannot hold (names the option)."""


class ConfigError(CamError, ValueError):
    """A model configuration that is incomplete, contradictory or unsupported (names the field)."""


class CheckpointError(CamError):
    """A checkpoint that is missing, truncated or does not fit (names the file and the tensor)."""


class InputError(CamError, ValueError):
    """A prompt, mask or batch that the model cannot take (names the argument)."""


class MeshError(CamError, ValueError):
    """A device mesh that cannot be built or used (names the axis and the number of devices)."""


class DistributedError(CamError, RuntimeError):
    """Processes that do not come together, disagree or have lost one of them (names which)."""


class DependencyError(CamError, ImportError):
    """An optional package that the call needs is not installed (names the extra)."""
