"""The torch loop that ubar_jax is measured against computes the same rules."""

import numpy as np
import pytest
import reference

from ubar_jax.experiments import bench
from ubar_jax.rules import rules
from ubar_jax.testing import by_reference, random_case

torch = pytest.importorskip(
    "torch", reason="the serial torch loop needs torch: pip install -e '.[benchmark]'"
)
serial = bench.load_serial()


@pytest.mark.parametrize("name", serial.RULES)
def test_torch_rule_equals_its_reference(name):
    rule = rules.parse(name)
    counting = rule.part.traits["count"]

    def in_torch(node, **arguments):
        own, messages = torch.from_numpy(node.own), torch.from_numpy(node.messages)
        count = 0
        if counting is not None:
            (count,) = counting(np.array([node.degree]), np.array([node.byzantine]), **rule.of(counting))

        def loss(x):
            return torch.tensor(node.loss(x.numpy()), dtype=torch.float64)

        return serial.RULES[name](own, messages, count, node.own_loss, loss).numpy(), None

    for seed in range(60):
        case = random_case(seed, least=1 + seed % 4)
        mixed, _ = by_reference(rule, in_torch, case)
        expected, _ = by_reference(rule, getattr(reference, name), case)
        np.testing.assert_allclose(mixed, expected, rtol=1e-9, atol=1e-9, err_msg=f"seed {seed}")


def test_the_benchmark_compares_the_same_computation():
    """A whole aggregation of a small network with real losses, ours and the loop's, agree."""
    scene = bench.make_scene("mlp", (28, 28, 1), benign=8, batch=16)
    for name in serial.RULES:
        ours, torchs = bench.contenders(scene, name, serial)
        np.testing.assert_allclose(np.asarray(ours()), torch.stack(torchs()).numpy(), rtol=1e-4, atol=1e-5)


def test_a_power_law_is_fitted_on_the_upper_half():
    sizes = np.array([1, 2, 4, 8, 16, 32])
    times = np.where(sizes < 8, 5.0, 3 * sizes**1.5)
    assert bench.exponent(sizes, times) == pytest.approx(1.5)
