"""The policies that the demo compares, the unlimited model first."""

from dataclasses import dataclass

from cam_jax.capacity import CapacityPolicy


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the demo's table.

    Attributes:
        name: what it is called there.
        policy: None for the model as trained.
    """

    name: str
    policy: CapacityPolicy | None

    @property
    def title(self) -> str:
        """Name and capacity factor."""
        factor = None if self.policy is None else self.policy.capacity_factor
        return self.name if factor is None else f"{self.name} γ = {factor:g}"


def _case(name: str, capacity_factor: float, **options: str) -> Case:
    policy = CapacityPolicy(capacity_factor=capacity_factor, **options)  # type: ignore[arg-type]
    return Case(name=name, policy=policy)


UNLIMITED = Case(name="No ceiling", policy=None)

#: The case that the picture and the closing remark compare with the unlimited model.
TIGHT = _case("Token Drop", 1.0)

CASES = (
    UNLIMITED,
    _case("Token Drop", 2.0),
    _case("Token Drop", 1.5),
    TIGHT,
    _case("Expanded Drop", 1.5, expand="local"),
    _case("Expanded Drop", 1.0, expand="local"),
    _case("Keep first", 1.0, metric="first"),
    _case("Keep last", 1.0, metric="last"),
    _case("Keep random", 1.0, metric="random"),
)
