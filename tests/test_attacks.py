import pytest
import reference

from ubar_jax.attacks import attacks
from ubar_jax.registry import ConfigError
from ubar_jax.testing import check_attack


@pytest.mark.parametrize("spec", [*attacks.parts, "gaussian(std=30)"])
def test_contract(spec):
    check_attack(spec, getattr(reference, attacks.parse(spec).part.name))


def test_strength_outside_its_range_is_refused():
    with pytest.raises(ConfigError, match="std is a number > 0"):
        attacks.parse("gaussian(std=-1)")
