import dataclasses
import functools

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
import reference
from conftest import not_quickly, slowly

from ubar_jax import Config, simulate
from ubar_jax.engine.compilation import compiled_chunk, initial_state
from ubar_jax.engine.preparation import prepare
from ubar_jax.engine.round import draw, ravel, without_lost
from ubar_jax.parts.aggregation import rules
from ubar_jax.parts.byzantine import attacks, first_memory, messages_of, tailored_since
from ubar_jax.parts.byzantine.moments import alie_z
from ubar_jax.parts.byzantine.search import largest
from ubar_jax.registry import ConfigError, Number
from ubar_jax.testing import check_attack, random_scene, start_of, view_of
from ubar_jax.types import Graph, View

LONG = ("mhamdi", "alie_optimised", "ipm_optimised", "fang_krum", "fang_trimmed")  # to compile or to search
OTHERS = [
    "gaussian(std=30)",
    "alie(z=1.5)",
    "mhamdi(norm=inf)",
    "mhamdi(gamma=3)",
    "mhamdi(surrogate=deployed)",
    *(f"{name}(direction={d})" for name in ("min_max", "min_sum") for d in ("sign", "unit")),
    "sleeper(alie, start=4)",
    "sleeper(label_flip, start=4)",
    "sleeper(dissensus, start=4)",
    "theorem1(target=3, size=2, start=5)",
]
SPECS = [*(name for name in attacks.parts if name not in LONG), *not_quickly(*LONG), *slowly(*OTHERS)]


@pytest.mark.parametrize("spec", SPECS)
def test_contract(spec):
    attack = attacks.parse(spec)
    plain = getattr(reference, attack.part.name)
    if tailored_since(attack) is not None:
        # Rows of receivers without a Byzantine neighbour are never sent.
        heard = plain

        def plain(key, view, *memory, **arguments):
            sent, _ = messages_of(attack, key, view)
            told = heard(key, view, *memory, **arguments)
            rows, *memory = told if memory else (told,)
            rows = np.stack([s if row is None else row for s, row in zip(sent, rows, strict=True)])
            return (rows, *memory) if memory else rows

    check_attack(spec, plain, graphs=3 if attack.part.name == "mhamdi" else 10)  # the plain search is slow


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5))
def send(attack, key, scene, benign, byzantine, deployed):
    view, start = view_of(scene, benign, byzantine, deployed), start_of(scene.own, scene.graph, byzantine)
    return messages_of(attack, key, view, first_memory(attack, start))[0]


def scene_for(spec, seed):
    attack, deployed = attacks.parse(spec), rules.parse("ubar")
    scene = random_scene(seed, attack, deployed)
    sent = send(attack, jax.random.key(seed), *scene, deployed)
    return view_of(*scene, deployed), np.asarray(sent, float)


@pytest.mark.medium
@pytest.mark.parametrize("norm", ["2", *slowly("inf")])
@pytest.mark.parametrize("surrogate", ["krum", *slowly("deployed")])
def test_the_searched_gamma_is_maximal(norm, surrogate):
    """0.999 gamma goes unnoticed, 1.01 gamma does not; gammas of 0 and at the cap are skipped."""
    spec, takes = f"mhamdi(norm={norm}, surrogate={surrogate})", getattr(reference, f"{surrogate}_takes")
    searched = 0
    for seed in range(6):
        view, sent = scene_for(spec, seed)
        for a in range(view.byzantine):
            seen, _ = reference._seen(view, a)
            step = sent[a] - seen.mean(0)
            gamma = np.abs(step).max()
            if not 1e-4 < gamma < 0.99e6:
                continue
            searched += 1
            assert takes(view, a, seen.mean(0) + 0.999 * step), (seed, a)
            assert not takes(view, a, seen.mean(0) + 1.01 * step), (seed, a)
    assert searched > 10


@pytest.mark.medium
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_near_consensus_the_search_finds_what_it_finds_farther_apart(norm):
    """Krum is scale-free: models 1000 times closer give gammas 1000 times smaller, or again the cap."""
    attack, deployed = attacks.parse(f"mhamdi(norm={norm})"), rules.parse("ubar")
    bounded = unbounded = 0
    for seed in range(6):
        scene, benign, byzantine = random_scene(seed, attack, deployed)
        found = []
        for spread in (1, 1e-3):
            close = scene._replace(own=scene.own * np.float32(spread))
            view = view_of(close, benign, byzantine, deployed)
            means = np.stack([reference._seen(view, a)[0].mean(0) for a in range(byzantine)])
            sent = np.asarray(send(attack, jax.random.key(0), close, benign, byzantine, deployed), float)
            found.append(np.abs(sent - means).max(1))
        for wide, small in zip(*found, strict=True):
            if wide > 0.99e6:
                unbounded += 1
                assert small > 0.99e6
            elif wide > 1e-2:
                bounded += 1
                assert small == pytest.approx(wide / 1e3, rel=1e-2)
    assert bounded > 10 and unbounded > 0


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_by_the_deployed_rule_the_search_finds_the_same_if_that_is_krum(norm):
    deployed, bounded = rules.parse("dkrum(rho=0.4)"), 0
    for seed in range(6):
        found = []
        for surrogate in ("krum", "deployed"):
            attack = attacks.parse(f"mhamdi(norm={norm}, surrogate={surrogate})")
            scene, benign, byzantine = random_scene(seed, attack, deployed)
            view = view_of(scene, benign, byzantine, deployed)
            means = np.stack([reference._seen(view, a)[0].mean(0) for a in range(byzantine)])
            sent = send(attack, jax.random.key(0), scene, benign, byzantine, deployed)
            found.append(np.abs(np.asarray(sent, float) - means).max(1))
        for krum, same in zip(*found, strict=True):
            if 1e-2 < krum < 1e3:  # at large gamma float32 in the rule cannot resolve the honest models
                bounded += 1
                assert same == pytest.approx(krum, rel=1e-2)
    assert bounded > 10


QUICKLY = ("gaussian", "label_flip", "dissensus")


@pytest.mark.medium
@pytest.mark.parametrize("value", [np.nan, *slowly(1e30)])
@pytest.mark.parametrize("spec", [*QUICKLY, *slowly(*sorted(set(attacks.parts) - set(QUICKLY)), *OTHERS)])
def test_one_lost_model_does_not_disarm_the_attackers(spec, value):
    """The other nodes get the same messages as if the lost node did not exist."""
    attack, deployed = attacks.parse(spec), rules.parse("ubar")
    (scene, benign, byzantine), setup = random_scene(0, attack, deployed), attack.traits.setup
    lost = 1
    own = scene.own.copy()
    own[lost] = value
    ids, mask = scene.graph
    apart = mask & (ids != lost)
    apart[lost] = False
    numbers = {}
    if setup:
        network = nx.Graph((i, int(j)) for i in range(len(ids)) for j in ids[i][mask[i]])
        numbers = setup(network, benign, byzantine, 1000, deployed, **attack.of(setup))[0]
    told = []
    for changed in (scene._replace(own=own), scene._replace(graph=Graph(ids, apart))):
        view = view_of(changed, benign, byzantine, deployed)
        memory = first_memory(attack, start_of(changed.own, changed.graph, byzantine))
        told.append(np.asarray(messages_of(attack, jax.random.key(0), view, memory, **numbers)[0]))
    if tailored_since(attack) is not None:
        told = [np.delete(rows, len(rows) - benign + lost, axis=0) for rows in told]
    if not ("deployed" in spec or "optimised" in spec):  # the deployed rule still hears the lost node
        np.testing.assert_allclose(*told, rtol=1e-3, atol=1e-4)
    assert spec == "nonfinite" or np.isfinite(told[0]).all()


@pytest.mark.parametrize(("rule", "lost"), [("average", [3, 4]), ("ubar", [2, 3, 4])])
def test_a_model_is_too_large_only_for_a_rule_that_defends(rule, lost):
    honest = np.zeros((5, 4), np.float32)
    honest[1:] = np.array([[1e10], [1e30], [np.inf], [np.nan]])
    neighbours = np.array([[j for j in range(6) if j != i] for i in range(6)], np.int32)
    ids, mask = without_lost(Graph(neighbours, np.ones_like(neighbours, bool)), honest, rules.parse(rule))
    np.testing.assert_array_equal(mask, ~np.isin(ids, lost) & ~np.isin(np.arange(6), lost)[:, None])


def test_the_largest_gamma_below_a_limit_is_found():
    limits = jnp.array([0.0, 3e-7, 0.02, 1.0, 7.3, 4e5, 1e9])
    expected = np.minimum(limits, 1e6)
    found = largest(lambda gamma: (gamma <= limits) & (gamma > 0), len(limits))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert (found <= expected).all()
    one_by_one = jax.vmap(lambda limit: largest(lambda gamma: (gamma <= limit) & (gamma > 0), 1))(limits)
    np.testing.assert_allclose(one_by_one[:, 0], expected, rtol=1e-4)


def test_a_search_ends_with_the_last_attacker():
    tried = []

    def chosen(gamma):
        jax.debug.callback(lambda gamma: tried.append(gamma), gamma)
        return gamma <= jnp.array([0.3, 5.0])

    largest(chosen, 2)
    jax.effects_barrier()
    assert 15 <= len(tried) <= 20


@pytest.mark.medium
@pytest.mark.parametrize("direction", ["std", "sign", "unit"])
def test_min_max_and_min_sum_go_as_far_as_they_may(direction):
    for seed in range(5):
        for name in ("min_max", "min_sum"):
            view, sent = scene_for(f"{name}(direction={direction})", seed)
            for a in range(view.byzantine):
                seen, ids = reference._seen(view, a)
                if len(ids) < 2:
                    continue
                distances = np.array([[np.linalg.norm(x - y) for y in seen] for x in seen])
                for stretch, within in ((0.999, True), (1.01, False)):
                    v = seen.mean(0) + stretch * (sent[a] - seen.mean(0))
                    to_v = np.array([np.linalg.norm(v - x) for x in seen])
                    if name == "min_max":
                        assert (to_v.max() <= distances.max()) == within
                    else:
                        assert ((to_v**2).sum() <= (distances**2).sum(1).max()) == within


def test_alie_z_by_hand():
    assert alie_z(30, 30) == pytest.approx(1.8339, abs=1e-4)  # 29 of 30
    assert alie_z(30, 3) == pytest.approx(0.0837, abs=1e-4)  # s = 17 - 3 = 14, 16 of 30


def path_config(tmp_path, length, **changes):
    graph = nx.path_graph(length + 1)
    graph.nodes[length]["byzantine"] = True  # benign nodes 0 .. length - 1, then the attacker
    nx.write_graphml(graph, tmp_path / "path.graphml")
    base = Config(
        rule="average",
        topology=f"file(path={str(tmp_path / 'path.graphml')!r})",
        dataset="synthetic(examples=400)",
        model="mlp(hidden=8)",
        nodes=length,
        byzantine_ratio=1 / (length + 1),
        batch_size=16,
        learning_rate=0.0,
        rounds=1,
        eval_every=1,
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.medium
@pytest.mark.parametrize("distance", [4, *slowly(1, 2, 5)])
def test_theorem_1_is_exact_on_a_path(distance, tmp_path):
    """Learning rate 0 and one path: after tau rounds the target has moved by `size`."""
    target = 5 - distance
    config = path_config(tmp_path, 5, attack=f"theorem1(target={target}, size=3.0)", rounds=distance)
    start = np.asarray(ravel(initial_state(prepare(config).program, 0).params))
    moved = np.asarray(ravel(simulate(config).state.params)) - start
    np.testing.assert_allclose(moved[target], 3.0, rtol=1e-5)
    if target > 0:
        np.testing.assert_allclose(moved[target - 1], 0, atol=1e-6)  # not reached yet


@pytest.mark.slow
def test_one_node_of_thirty_ruins_all_others_under_average():
    base = Config(rule="average", nodes=29, byzantine_ratio=1 / 30, batch_size=32, rounds=40, eval_every=40)
    honest = simulate(dataclasses.replace(base, attack="none"))
    ruined = simulate(dataclasses.replace(base, attack="theorem1(size=1000)"))
    assert honest.final["accuracy"].min() > 0.7
    assert ruined.final["accuracy"].max() < 0.35


def test_theorem_1_after_the_end_is_noticed():
    late = prepare(Config(attack="theorem1(start=4)", byzantine_ratio=0.3, rounds=4, eval_every=1))
    assert any("never strikes" in notice for notice in late.notices)


def test_a_sleeper_passes_the_inner_arguments_on_to_the_poison():
    def poison(labels, classes, t, shift):
        return (labels + shift) % classes

    @attacks.register(trains=True, poison=poison)
    def shifted(key, view, shift: Number(0, integer=True) = 1):
        """Trains on other labels. Knows nothing."""
        return view.own[view.benign :]

    sleeper = attacks.parse("sleeper(shifted(shift=3), start=2)")
    outer = sleeper.traits.poison
    for t, wanted in ((1, [0, 4]), (2, [3, 2])):
        got = outer(jnp.array([0, 4]), 5, jnp.int32(t), **sleeper.of(outer))
        np.testing.assert_array_equal(got, wanted)
    del attacks.parts["shifted"]


@pytest.mark.slow
def test_a_sleeper_is_honest_until_it_wakes():
    base = Config(byzantine_ratio=0.3, batch_size=16, rounds=4, eval_every=1)
    awake = simulate(dataclasses.replace(base, attack="sleeper(gaussian, start=2)"))
    asleep = simulate(dataclasses.replace(base, attack="sleeper(gaussian, start=4)"))
    np.testing.assert_array_equal(awake.curves["accuracy"][:3], asleep.curves["accuracy"][:3])
    assert not np.array_equal(awake.curves["train_loss"][3], asleep.curves["train_loss"][3])
    assert any("never wakes" in notice for notice in asleep.notices)
    assert not awake.notices


@pytest.mark.slow
def test_label_flip_trains_on_flipped_labels():
    config = Config(
        attack="label_flip", byzantine_ratio=0.3, nodes=4, batch_size=16, rounds=60, eval_every=60
    )
    config = dataclasses.replace(config, alpha=1.0)  # messages are ignored: nodes learn their own data
    result = simulate(config)
    honest = simulate(dataclasses.replace(config, attack="bit_flip"))
    asleep = simulate(dataclasses.replace(config, attack="sleeper(label_flip, start=60)"))
    half = simulate(dataclasses.replace(config, attack="sleeper(label_flip, start=30)"))
    benign = np.asarray(ravel(result.state.params))
    other = np.asarray(ravel(honest.state.params))
    np.testing.assert_allclose(benign[:4], other[:4], rtol=1e-5, atol=1e-6)
    assert np.linalg.norm(benign[4:] - other[4:], axis=1).min() > 1
    np.testing.assert_array_equal(ravel(asleep.state.params), other)
    halfway = np.asarray(ravel(half.state.params))[4:]
    assert min(np.linalg.norm(halfway - x[4:], axis=1).min() for x in (benign, other)) > 0.5
    flipped = attacks.get("label_flip").traits.poison(np.arange(10), 10, 0)
    np.testing.assert_array_equal(flipped, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0])


@pytest.fixture
def spies():
    """Rules that return a message: `spy_own` the node's broadcast, `spy_bad` what an attacker sent to it."""

    @rules.register(defends=False)
    def spy_own(inbox):
        return inbox.sent[: len(inbox.own)], {}

    @rules.register(defends=False)
    def spy_bad(inbox):
        bad = inbox.graph.mask & (inbox.graph.neighbours >= 6)
        row = jnp.max(jnp.where(bad, inbox.rows, -1), axis=1)
        return jnp.where(row[:, None] < 0, inbox.own, inbox.sent[row]), {}

    yield
    del rules.parts["spy_own"], rules.parts["spy_bad"]


def one_round(rule, attack):
    """Models before and after one round without training, and the attackers' view; 6 + 3 nodes."""
    config = Config(
        rule=rule, attack=attack, dataset="synthetic(examples=300)", model="mlp(hidden=4)", nodes=6
    )
    config = dataclasses.replace(config, byzantine_ratio=1 / 3, batch_size=8, rounds=1, eval_every=1)
    experiment = prepare(dataclasses.replace(config, alpha=0.0, learning_rate=0.0))
    program = experiment.program
    state = initial_state(program, 0)
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(lambda a: a + rng.normal(size=a.shape).astype(np.float32), state.params)
    before = np.array(ravel(noisy))
    drawn = draw(program.drawing, *experiment.drawn_from, state.key, state.t)
    arguments = (drawn, experiment.data, experiment.graph, experiment.knobs, np.int32(1))
    state, _ = compiled_chunk(program).call(state._replace(params=noisy), *arguments)
    view = View(
        own=before,
        update=None,
        graph=experiment.graph,
        benign=6,
        byzantine=program.byzantine,
        benign_slots=program.benign_slots,
        t=0,
        deployed=None,
    )
    return before, np.asarray(ravel(state.params)), view


@pytest.mark.medium
@pytest.mark.parametrize("attack", [*QUICKLY, *slowly(*sorted(set(attacks.parts) - {"none", *QUICKLY}))])
def test_honest_messages_are_never_changed(attack, spies):
    before, after, _ = one_round("spy_own", attack)
    np.testing.assert_array_equal(after[:6], before[:6])


@pytest.mark.medium
@pytest.mark.parametrize("attack", ["dissensus", *slowly("isolation", "sleeper(dissensus, start=0)")])
def test_every_receiver_is_told_its_own_lie(attack, spies):
    _, after, view = one_round("spy_bad", attack)
    plain = reference.isolation(None, view) if attack == "isolation" else reference.dissensus(None, view, 1.5)
    told = [i for i, row in enumerate(plain) if row is not None]
    assert len(told) > 3
    np.testing.assert_allclose(after[told], np.stack([plain[i] for i in told]), rtol=1e-4, atol=1e-4)


@pytest.mark.medium
def test_a_sleeping_dissensus_is_honest(spies):
    before, after, view = one_round("spy_bad", "sleeper(dissensus, start=1)")
    for i in range(6):
        bad = [j for j in reference._neighbours(view, i) if j >= 6]
        np.testing.assert_array_equal(after[i], before[max(bad)] if bad else before[i])


@pytest.mark.slow
def test_tailored_messages_reach_their_receivers(tmp_path):
    """On the path 0-1-2-3-attacker isolation sends node 3 (x_3 - (x_2 + x_3) / 3) / (1/3) = 2 x_3 - x_2.

    mimic sends it x_3, all else being equal, so after the mean with x_2 they differ by (x_3 - x_2) / 2.
    """

    def models(attack, rounds):
        config = path_config(tmp_path, 4, attack=attack, alpha=0.0, rounds=rounds, learning_rate=0.5)
        return np.asarray(ravel(simulate(config).state.params))

    before = models("isolation", 1)
    np.testing.assert_allclose(before, models("mimic(node=3)", 1), rtol=1e-5, atol=1e-6)
    isolated, mimicked = models("isolation", 2), models("mimic(node=3)", 2)
    np.testing.assert_allclose(isolated[:3], mimicked[:3], rtol=1e-5, atol=1e-6)  # not its neighbours
    moved = (before[3] - before[2]) / 2
    assert np.abs(moved).max() > 1e-3
    np.testing.assert_allclose(isolated[3] - mimicked[3], moved, rtol=1e-3, atol=1e-6)


def test_mhamdi_by_the_deployed_rule_needs_one_that_selects():
    config = Config(attack="mhamdi(surrogate=deployed)", byzantine_ratio=0.3)
    for rule in ("dmedian", "bridge", "geometric_median"):
        with pytest.raises(ConfigError, match="use surrogate=krum"):
            prepare(dataclasses.replace(config, rule=rule))
    prepare(dataclasses.replace(config, rule="bridge(variant=K)"))
    prepare(dataclasses.replace(config, rule="dmedian", attack="mhamdi(surrogate=deployed, gamma=3)"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gaussian(std=-1)", "std is a number > 0"),
        ("mhamdi(norm=3)", "norm is 2 or 'inf'"),
        ("mhamdi(gamma=-1)", "gamma is a number >= 0 or 'search'"),
        ("min_max(direction=up)", "direction is 'std' or 'sign' or 'unit'"),
        ("ipm(eps=-1)", "eps is a number >= 0"),
        ("theorem1(target=10)", "only the benign nodes 0 to 9"),
        ("mimic(node=10)", "only the benign nodes 0 to 9"),
        ("sleeper(gausian)", r"did you mean 'gaussian'\?"),
        ("sleeper(none)", "sleeper cannot wake up as 'none'"),
        ("sleeper(5)", "attack=5 is not allowed; attack is a word"),
        ("sleeper(sleeper)", "sleeper cannot wake up as 'sleeper'"),
        ("gaussian(std=1e39)", r"std=1e\+39 is not allowed; std is a number > 0 \(0, or from"),
        ("gaussian(std=1e-60)", r"std=1e-60 is not allowed"),
        ("sleeper(alie(z=-1e39))", r"z=-1e\+39 is not allowed"),
        ("theorem1(size=3e38)", "too large for float32; take a smaller size"),
        ("sleeper(theorem1(target=10))", "only the benign nodes 0 to 9"),
    ],
)
def test_bad_arguments_are_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        prepare(Config(attack=spec, byzantine_ratio=0.3))


def test_theorem_1_needs_a_path(tmp_path):
    graph = nx.Graph([(0, 1), (1, 2), (3, 4)])
    for node in (3, 4):
        graph.nodes[node]["byzantine"] = True
    nx.write_graphml(graph, tmp_path / "g.graphml")
    config = path_config(tmp_path, 3, attack="theorem1", byzantine_ratio=0.4)
    config = dataclasses.replace(config, topology=f"file(path={str(tmp_path / 'g.graphml')!r})")
    with pytest.raises(ConfigError, match="there is no path"):
        prepare(config)
