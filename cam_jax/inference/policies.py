"""Which policy holds where: one for all MoE layers or one per layer, in prefill and in decode."""

from typing import Any

from cam_jax.capacity import CapacityPolicy
from cam_jax.errors import PolicyError
from cam_jax.groups import mesh_sizes
from cam_jax.mesh import token_devices
from cam_jax.models.config import DecoderConfig

Policy = CapacityPolicy | None | tuple[CapacityPolicy | None, ...]


def check_policy(policy: Any, moe_layers: int) -> Policy:
    """``policy`` as it came, if it can hold for a model with so many MoE layers.

    Raises:
        PolicyError: not a policy, or a tuple whose length is not the number of MoE layers.
    """
    if isinstance(policy, list):
        policy = tuple(policy)
    if isinstance(policy, tuple):
        if len(policy) != moe_layers:
            raise PolicyError(
                f"policy has {len(policy)} entries, the model has {moe_layers} MoE layers: give "
                "one policy for all of them, or one (or None) per layer"
            )
        for layer, one in enumerate(policy):
            _check_one(one, f"policy[{layer}]")
        return policy
    _check_one(policy, "policy")
    return policy


def decode_policy(policy: Policy) -> Policy:
    """The policy of decode steps: None (no ceiling, dropless) wherever the policy exempts them."""
    if isinstance(policy, tuple):
        layers = tuple(decode_policy_of_layer(one) for one in policy)
        return layers if any(one is not None for one in layers) else None
    return decode_policy_of_layer(policy)


def decode_policy_of_layer(policy: CapacityPolicy | None) -> CapacityPolicy | None:
    """As `decode_policy`, of one layer."""
    return policy if policy is not None and policy.decode == "capped" else None


def grouped_by_device(policy: Policy) -> bool:
    """Whether any layer divides the batch into groups by device."""
    layers = policy if isinstance(policy, tuple) else (policy,)
    return any(one is not None and one.group == "device" for one in layers)


def device_sizes(mesh: Any, virtual_devices: int | tuple[int, int]) -> tuple[int, int]:
    """(data, expert): devices that rows and experts are divided among, real or emulated.

    Raises:
        PolicyError: sizes that are not positive, or emulated devices beside real ones.
        MeshError: not a mesh of `cam_jax.make_mesh`.
    """
    sizes = mesh_sizes(virtual_devices)
    if mesh is None:
        return sizes
    if sizes != (1, 1):
        raise PolicyError(
            f"virtual_devices={virtual_devices!r} emulates devices where there are none: leave it "
            "out with a mesh"
        )
    token_devices(mesh)
    return int(mesh.shape["data"]), int(mesh.shape["expert"])


def check_devices(config: DecoderConfig, mesh: Any, virtual_devices: int | tuple[int, int]) -> None:
    """Refuses devices that a model's experts cannot be divided among.

    Raises:
        PolicyError: as `device_sizes`, or more emulated devices than experts.
    """
    _, devices = device_sizes(mesh, virtual_devices)
    experts = devices if config.moe is None else config.moe.router.num_experts
    if mesh is None and devices > experts:
        raise PolicyError(
            f"virtual_devices={virtual_devices!r} divides {experts} experts among {devices} "
            "devices: use at most one device per expert"
        )


def row_devices(mesh: Any) -> int:
    """Devices that a batch's rows must divide over; emulated devices divide them by themselves."""
    return 1 if mesh is None else token_devices(mesh)


def group_notes(
    rows: int, policy: Policy, mesh: Any, virtual_devices: int | tuple[int, int]
) -> tuple[str, ...]:
    """Says when a batch leaves groups empty, so that fewer devices' tokens compete than it
    seems.
    """
    data, expert = device_sizes(mesh, virtual_devices)
    groups = data * expert
    filled = -(-rows // -(-rows // groups))
    if groups == 1 or filled == groups:
        return ()
    what = "1 prompt fills" if rows == 1 else f"{rows} rows fill"
    devices = "devices" if mesh is not None else "virtual devices"
    note = f"{what} {filled} of the {groups} groups ({groups} {devices}); the others stay empty"
    if grouped_by_device(policy):
        note += (
            ". The ceiling holds per group: send a multiple of that many rows to load every device"
        )
    return (note,)


def _check_one(policy: Any, name: str) -> None:
    if policy is not None and not isinstance(policy, CapacityPolicy):
        raise PolicyError(f"{name} must be a CapacityPolicy or None, got a {type(policy).__name__}")
