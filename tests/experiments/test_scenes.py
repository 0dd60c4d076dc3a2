"""Scenes of the benchmarks; torch is not needed."""

import jax
import pytest

from ubar_jax.experiments.bench import scenes
from ubar_jax.experiments.bench.tables import PAPER
from ubar_jax.parts import topology


@pytest.mark.slow
@pytest.mark.parametrize("rule", PAPER)
def test_growth_is_measured_on_an_aggregation_of_every_node(rule):
    work, arguments = scenes.ours(scenes.growth_scene(topology.random_regular(0, 12, 8), d=5), rule)
    assert jax.jit(work)(*arguments).shape == (12, 5)


@pytest.mark.slow
def test_a_whole_round_is_the_simulators():
    work, (state, *rest) = scenes.whole_round(scenes.make_scene("mlp", 4, 8), "ubar")
    after, seen = jax.jit(work)(state, *rest)
    assert int(after.t) == 1 and seen.finite.all() and seen.accepted.any()
