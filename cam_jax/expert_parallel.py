"""The MoE layer on a device mesh, under `jax.shard_map`: the same computation as on one device.

R sequences per device, S positions, G groups of T tokens on a device, D features, E experts.

A device routes its own tokens before anything is sent (He et al., section 3), so the ceiling
bounds what crosses the network. Statistics take one reduction of a small vector.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from cam_jax.capacity import CapacityPolicy
from cam_jax.errors import MeshError, PolicyError
from cam_jax.experts import ExpertWeights, MoEParams, SharedExpert, shared_expert
from cam_jax.group_routing import group_demand, route_groups, select_groups
from cam_jax.load_stats import LoadStats
from cam_jax.mesh import DATA, EXPERT, TENSOR, TOKENS, token_devices
from cam_jax.plan import RoutingPlan
from cam_jax.quantized import QuantizedWeight
from cam_jax.router import RouterConfig, Selection
from cam_jax.transports import MESH_TRANSPORTS

P = PartitionSpec


def expert_parallel_layer(
    x: Float[Array, "B S D"],
    params: MoEParams,
    router: RouterConfig,
    policy: CapacityPolicy,
    *,
    mesh: Mesh,
    valid: Bool[Array, "B S"],
    priority: Int[Array, "B S"] | None,
    layer: int | Int[Array, ""],
    transport: str | None,
) -> tuple[Float[Array, "B S D"], LoadStats]:
    """`cam_jax.moe_layer` for a mesh of `cam_jax.make_mesh`; arguments as there.

    Sequences that do not divide over data x expert are padded at the end with invalid ones, experts
    that do not divide with dead ones that no token can choose.

    Raises:
        MeshError: fewer experts than devices on "expert", fewer sequences than devices, F not
            divisible over "tensor", or a mesh with other axes.
        PolicyError: a transport that cannot serve the policy.
    """
    devices, ep_size = token_devices(mesh), int(mesh.shape[EXPERT])
    _check(x.shape[0], params, router, mesh)
    program = _Program(
        router=router,
        policy=policy,
        ep_size=ep_size,
        devices=devices,
        tensor=int(mesh.shape[TENSOR]) > 1,
        transport=_transport_name(transport, policy),
    )
    rows = x.shape[0]
    missing = -rows % devices
    x, valid, priority = (_pad_rows(leaf, missing) for leaf in (x, valid, priority))
    params = dataclasses.replace(params, experts=_pad_experts(params.experts, router, mesh))
    tokens = P(TOKENS)
    run = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(
            tokens,
            tokens,
            None if priority is None else tokens,
            param_specs(params, tensor=program.tensor),
            P(),
        ),
        out_specs=(tokens, P()),
    )
    y, load = run(x, valid, priority, params, jnp.asarray(layer, jnp.int32))
    return y[:rows], load


def param_specs(params: MoEParams, *, tensor: bool = True) -> MoEParams:
    """How a layer's weights lie on the mesh: experts over "expert", their F over "tensor".

    Args:
        tensor: False leaves "tensor" out: over one device it divides nothing, but what varies over
            it would have to be added up all the same.
    """
    shared, over = params.shared, TENSOR if tensor else None

    def routed(weight: Any, spec: PartitionSpec) -> Any:
        if not isinstance(weight, QuantizedWeight):
            return spec
        # A scale holds for a whole row: where rows are divided, each part needs it.
        return QuantizedWeight(values=spec, scale=P(*spec[:2]))

    return MoEParams(
        router=P(),
        experts=ExpertWeights(
            gate=routed(params.experts.gate, P(EXPERT, over)),
            up=routed(params.experts.up, P(EXPERT, over)),
            down=routed(params.experts.down, P(EXPERT, None, over)),
        ),
        bias=None if params.bias is None else P(),
        shared=None
        if shared is None
        else SharedExpert(
            gate=P(over),
            up=P(over),
            down=P(None, over),
            router=None if shared.router is None else P(),
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """What one device runs."""

    router: RouterConfig
    policy: CapacityPolicy
    ep_size: int
    devices: int
    tensor: bool
    transport: str

    def __call__(
        self,
        x: Float[Array, "R S D"],
        valid: Bool[Array, "R S"],
        priority: Int[Array, "R S"] | None,
        params: MoEParams,
        layer: Int[Array, ""],
    ) -> tuple[Float[Array, "R S D"], LoadStats]:
        ep_rank = lax.axis_index(EXPERT)
        device = lax.axis_index(DATA) * self.ep_size + ep_rank
        own = _Tokens.of_device(x, valid, priority, params, self.router)
        demand = None
        if self.policy.expert_drop:
            demand = lax.psum(group_demand(own.selection, own.valid), TOKENS)

        def plan(policy: CapacityPolicy) -> RoutingPlan:
            tokens, index, rank = own, device[None], ep_rank[None]
            if policy.limited and policy.group == "sequence":
                rows = jnp.arange(x.shape[0], dtype=jnp.int32)
                tokens = own.by_sequence(x.shape[0])
                index, rank = device * x.shape[0] + rows, jnp.broadcast_to(ep_rank, rows.shape)
            elif policy.limited and policy.group == "batch":
                tokens = own.everyone()
                held_by = np.repeat(np.arange(self.devices), own.valid.shape[-1])
                index = jnp.zeros(1, jnp.int32)
                rank = jnp.asarray(held_by % self.ep_size, jnp.int32)[None]
            return route_groups(
                tokens.selection,
                policy,
                valid=tokens.valid,
                priority=tokens.priority,
                demand=demand,
                layer=layer,
                index=index,
                ep_rank=rank,
                ep_size=self.ep_size,
            )

        if self.transport == "fallback":
            y, load = self._fallback(x, plan, params, device)
        else:
            routed = plan(self.policy)
            y = self._move(self.transport, x, routed, params)
            load = self._sum_load(
                routed,
                device,
                whole=self.transport == "all_gather",
                limited=self.policy.limited,
            )
        if params.shared is not None:
            flat = shared_expert(x.reshape(-1, x.shape[-1]), params.shared)
            y = jnp.where(valid[..., None], y + flat.reshape(x.shape), 0)
        # After the combine: [T, D] is what has to be added up, not [E_local, slots, D].
        return (lax.psum(y, TENSOR) if self.tensor else y), load

    def _move(self, name: str, x: Array, plan: RoutingPlan, params: MoEParams) -> Array:
        groups = plan.choice_slot.shape[0]
        x_g = x.reshape(groups, -1, x.shape[-1])
        return MESH_TRANSPORTS[name](x_g, plan, params.experts).reshape(x.shape)

    def _fallback(
        self,
        x: Array,
        plan: Callable[[CapacityPolicy], RoutingPlan],
        params: MoEParams,
        device: Array,
    ) -> tuple[Array, LoadStats]:
        """Buffers while no device overflows, an exact dropless pass on all of them otherwise."""
        policy = self.policy
        exact = plan(
            dataclasses.replace(policy, capacity_factor=None, capacity=None, overflow="drop")
        )
        capped = plan(policy)
        buffers = "all_gather" if policy.group == "batch" else "all_to_all"
        capped_load = self._sum_load(capped, device, whole=buffers == "all_gather", limited=True)
        exact_load = self._sum_load(exact, device, whole=False, limited=False)
        overflow = capped_load.dropped_capacity > 0  # summed over the mesh: all devices agree
        y = lax.cond(
            overflow,
            lambda: self._move("dropless", x, exact, params),
            lambda: self._move(buffers, x, capped, params),
        )
        load = jax.tree.map(lambda a, b: jnp.where(overflow, a, b), exact_load, capped_load)
        return y, dataclasses.replace(load, capacity=capped_load.capacity)

    def _sum_load(
        self, plan: RoutingPlan, device: Array, *, whole: bool, limited: bool
    ) -> LoadStats:
        """Adds the devices' statistics up in one reduction.

        Args:
            whole: each device has already those of all tokens, so that one of them counts.
            limited: the plan has a ceiling.
        """
        load = plan.load.sum(0)
        if whole:
            load = jax.tree.map(lambda leaf: jnp.where(device == 0, leaf, 0), load)
        # The ceiling is a maximum, which a sum gives if every device has an entry of its own.
        ceilings = jnp.zeros(self.devices, jnp.int32).at[device].set(load.capacity)
        leaves, tree = jax.tree.flatten(dataclasses.replace(load, capacity=ceilings))
        total = lax.psum(jnp.concatenate([jnp.atleast_1d(leaf) for leaf in leaves]), TOKENS)
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
        parts = jnp.split(total, ends)
        summed = jax.tree.unflatten(
            tree, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
        )
        # Without a ceiling an expert could get every token, those of other devices too.
        capacity = summed.capacity.max() if limited else summed.tokens
        return dataclasses.replace(summed, capacity=capacity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tokens:
    """A selection and what belongs to its tokens, leading axes [G, T]."""

    selection: Selection
    valid: Array
    priority: Array | None

    @classmethod
    def of_device(
        cls, x: Array, valid: Array, priority: Array | None, params: MoEParams, router: RouterConfig
    ) -> "_Tokens":
        flat = valid.reshape(1, -1)
        return cls(
            selection=select_groups(x.reshape(1, -1, x.shape[-1]), flat, params, router),
            valid=flat,
            priority=None if priority is None else priority.reshape(1, -1),
        )

    def by_sequence(self, rows: int) -> "_Tokens":
        return self._map(lambda leaf: leaf.reshape(rows, -1, *leaf.shape[2:]))

    def everyone(self) -> "_Tokens":
        """Those of all devices, in mesh order."""
        return self._map(lambda leaf: lax.all_gather(leaf, TOKENS, axis=1, tiled=True))

    def _map(self, change: Callable[[Array], Array]) -> "_Tokens":
        return _Tokens(
            selection=jax.tree.map(change, self.selection),
            valid=change(self.valid),
            priority=None if self.priority is None else change(self.priority),
        )


def _transport_name(name: str | None, policy: CapacityPolicy) -> str:
    """What moves the tokens of ``policy``; refuses a named transport that cannot."""
    if not policy.limited:
        needed, why = "dropless", "there is no ceiling"
    elif policy.overflow == "fallback":
        needed, why = "fallback", "overflow='fallback'"
    elif policy.group == "batch":
        needed, why = "all_gather", "group='batch'"
    else:
        needed, why = "all_to_all", f"group={policy.group!r}"
    choices = ("dropless", "gathered", "ragged") if needed == "dropless" else (needed,)
    if name is not None and name not in choices:
        raise PolicyError(
            f"transport={name!r} on a mesh: {why}, which needs "
            f"{' or '.join(map(repr, choices))}; leave transport=None"
        )
    return name or needed


def padded_experts(router: RouterConfig, mesh: Mesh) -> int:
    """Experts with the dead ones at the end that make them divide over "expert".

    Raises:
        MeshError: fewer experts than devices on "expert", or a mesh with other axes.
    """
    token_devices(mesh)
    devices = int(mesh.shape[EXPERT])
    if router.num_experts < devices:
        raise MeshError(
            f"the mesh has expert={devices} devices for {router.num_experts} experts: some would "
            "hold none; use fewer, and more on 'data'"
        )
    return -(-router.num_experts // devices) * devices


def check_batch(rows: int, mesh: Mesh) -> None:
    """Refuses a batch that would leave devices without any token.

    Raises:
        MeshError: fewer sequences than data x expert devices.
    """
    devices = token_devices(mesh)
    if rows < devices:
        raise MeshError(
            f"a batch of {rows} for data={mesh.shape[DATA]} x expert={mesh.shape[EXPERT]} = "
            f"{devices} devices leaves {devices - rows} of them without tokens: send at least "
            f"{devices} sequences at a time, or use a smaller mesh"
        )


def _check(rows: int, params: MoEParams, router: RouterConfig, mesh: Mesh) -> None:
    padded_experts(router, mesh)
    check_batch(rows, mesh)
    tensor = int(mesh.shape[TENSOR])
    widths = {"experts": params.experts.gate.shape[1]}
    if params.shared is not None:
        widths["shared expert"] = params.shared.gate.shape[0]
    for what, width in widths.items():
        if width % tensor:
            raise MeshError(f"tensor={tensor} does not divide the {what}' {width} hidden features")


def _pad_rows(leaf: Any, missing: int) -> Any:
    if leaf is None or not missing:
        return leaf
    return jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))


def _pad_experts(experts: ExpertWeights, router: RouterConfig, mesh: Mesh) -> ExpertWeights:
    """Dead experts at the end; weights that were loaded for the mesh have them already."""
    missing = padded_experts(router, mesh) - experts.gate.shape[0]
    return jax.tree.map(lambda leaf: _pad_rows(leaf, missing), experts) if missing else experts
