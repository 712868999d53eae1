"""Which policy holds where, and what is said about groups that stay empty."""

import pytest

from cam_jax import CapacityPolicy
from cam_jax.errors import PolicyError
from cam_jax.inference.policies import check_policy, decode_policy, group_notes

EXEMPT = CapacityPolicy(capacity_factor=1.0)
CAPPED = CapacityPolicy(capacity_factor=1.0, decode="capped")


def test_decode_steps_are_exempt_unless_capped():
    assert decode_policy(None) is None
    assert decode_policy(EXEMPT) is None
    assert decode_policy(CAPPED) is CAPPED
    assert decode_policy((EXEMPT, CAPPED, None)) == (None, CAPPED, None)
    assert decode_policy((EXEMPT, None)) is None


def test_one_policy_or_one_per_layer():
    assert check_policy(EXEMPT, 3) is EXEMPT
    assert check_policy([EXEMPT, None], 2) == (EXEMPT, None)
    with pytest.raises(PolicyError, match=r"2 entries.* 3 MoE layers"):
        check_policy((EXEMPT, None), 3)
    with pytest.raises(PolicyError, match=r"policy\[1\] must be"):
        check_policy((EXEMPT, 1.5), 2)
    with pytest.raises(PolicyError, match="policy must be"):
        check_policy(1.5, 2)


@pytest.mark.parametrize(
    ("rows", "virtual", "said"),
    [
        (1, 1, None),
        (8, 8, None),
        (16, (2, 4), None),
        (1, 8, "1 prompt fills 1 of the 8 groups"),
        (9, 8, "9 rows fill 5 of the 8 groups"),
        (3, (2, 2), "3 rows fill 3 of the 4 groups"),
    ],
)
def test_empty_groups_are_noted(rows, virtual, said):
    notes = group_notes(rows, EXEMPT, None, virtual)
    assert len(notes) == (said is not None)
    if said:
        assert notes[0].startswith(said) and "ceiling holds per group" in notes[0]
        assert "ceiling" not in group_notes(rows, None, None, virtual)[0]
