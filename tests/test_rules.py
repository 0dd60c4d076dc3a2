import numpy as np
import pytest
import reference

from ubar_jax.registry import ConfigError
from ubar_jax.rules import benign_neighbours, rules
from ubar_jax.testing import check_rule

SPECS = [
    *rules.parts,
    "ubar(rho=1.0)",
    "ubar(rho=0.05)",
    "ubar(rho='conservative')",
    "ubar(rho='oracle')",
]


@pytest.mark.parametrize("spec", SPECS)
def test_contract(spec):
    check_rule(spec, getattr(reference, rules.parse(spec).part.name))


def test_kept_neighbours_are_guarded_against_float_error():
    degree = np.arange(1, 201)
    for hundredths in range(1, 101):
        exact = np.maximum(1, hundredths * degree // 100)
        np.testing.assert_array_equal(benign_neighbours(degree, 0 * degree, hundredths / 100), exact)
    assert benign_neighbours(np.array([100]), np.array([0]), 0.29) == 29


def test_oracle_knows_the_true_share():
    degree, byzantine = np.array([3, 10, 7]), np.array([3, 4, 0])
    np.testing.assert_array_equal(benign_neighbours(degree, byzantine, "oracle"), [1, 6, 7])


@pytest.mark.parametrize("rho", ["0", "1.1", "-0.4", "'best'", "None"])
def test_rho_outside_its_range_is_refused(rho):
    with pytest.raises(ConfigError, match=r"rho is a number in \(0, 1\] or 'conservative'"):
        rules.parse(f"ubar(rho={rho})")


def test_a_wrong_rule_is_caught():
    """The contract itself can fail: UBAR falling back to the closest, a defect seen elsewhere."""

    def falls_back_to_the_closest(node, rho):
        near = reference._stage_1(node, rho)
        good = [j for j in near if node.loss(node.messages[j]) <= node.own_loss]
        closest = min(near, key=lambda j: np.linalg.norm(node.messages[j] - node.own))
        return reference._mean(node, good or [closest])

    with pytest.raises(AssertionError, match="not its reference"):
        check_rule("ubar", falls_back_to_the_closest)
