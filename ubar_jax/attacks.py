"""Attacks: one function each, from (key, View) to what the Byzantine nodes send.

That is one vector a Byzantine node, [f, d], broadcast to all its neighbours; an attack that is
`tailored` gives one vector a benign receiver instead, [n_b, d], which all of that node's Byzantine
neighbours tell it (if it also trains, [f + n_b, d]: first what Byzantine nodes tell each other). Honest
rows cannot be touched. Further traits: `trains`, whether the Byzantine nodes follow the protocol otherwise
(train on their share and apply the rule to what they receive), so that `view.own[view.benign:]` are their
models; `poison`, what they do to the labels they train on; `setup`, run once on the host with the network,
which checks the arguments and returns (traced numbers for the attack, notices). Real-valued arguments are
traced: one compiled program serves every strength.

Each description ends in what the attacker knows. mu and sigma are the mean and deviation per coordinate
of the models that its benign neighbours send it, the ones it has seen. `targeted.py` has the attacks that
depend on where and when: on the graph, on the receiver or on the round.
"""

import math
from statistics import NormalDist

import jax
import jax.numpy as jnp
from jax import Array, lax

from ubar_jax import linalg
from ubar_jax.registry import Choice, ConfigError, Number, Registry, Spec
from ubar_jax.types import View
from ubar_jax.unnoticed import (
    Quadratics,
    Seen,
    average_of,
    honest_distances,
    krum_chooses,
    largest,
    living,
    quadratics,
    seen_by_attackers,
)

attacks = Registry(
    "attack",
    given=2,
    traits={"trains": False, "tailored": False, "poison": None, "setup": None},
)

POSITIVE = Number(0, open_low=True)


def tailored_since(attack: Spec) -> int | None:
    """The round from which on the attack tells every receiver something else; None if it never does."""
    tailored = attack.part.traits["tailored"]
    if callable(tailored):
        return tailored(**attack.of(tailored))
    return 0 if tailored else None


def check_range(attack: Spec, numbers: dict) -> None:
    """Refuses numbers of an attack that float32 does not have."""
    for name, value in numbers.items():
        if isinstance(value, float) and not Number().accepts(value):
            raise ConfigError(
                f"{attack}: {name}={value:g} is not allowed; it is a number{Number().limits(value)}"
            )


@attacks.register
def none(key: Array, view: View) -> Array:
    """No Byzantine nodes at all, whatever the ratio: the attack-free baseline."""
    return jnp.zeros((view.byzantine, view.own.shape[1]))


@attacks.register
def gaussian(key: Array, view: View, std: POSITIVE = 1.0) -> Array:
    """Random vectors N(0, std^2), fresh each round. Knows nothing."""
    return std * jax.random.normal(key, (view.byzantine, view.own.shape[1]))


@attacks.register(trains=True)
def bit_flip(key: Array, view: View) -> Array:
    """Minus the node's own estimate; otherwise honest. Knows its own model."""
    return -view.own[view.benign :]


@attacks.register
def nonfinite(key: Array, view: View) -> Array:
    """NaN, +inf, -inf and 1e30 in turn, from node to node and round to round. Knows nothing."""
    values = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1e30])
    turn = values[(view.t + jnp.arange(view.byzantine)) % 4]
    return jnp.broadcast_to(turn[:, None], (view.byzantine, view.own.shape[1]))


def _sigma(seen: Seen) -> Array:
    """[f, d] deviation per coordinate of what each attacker sees; of a single vector exactly 0."""
    squares = average_of(seen.adjacent, seen.count, jnp.square(seen.honest))
    variance = jnp.maximum(squares - jnp.square(seen.mean), 0)
    return jnp.where(seen.count > 1, jnp.sqrt(variance), 0)


def alie_z(benign: int, byzantine: int) -> float:
    """ALIE's z: so many honest vectors are farther out that the attackers and they are a majority."""
    n = benign + byzantine
    supporters = max(1, n // 2 + 1 - byzantine)
    return NormalDist().inv_cdf(max((benign - supporters) / benign, 1e-6))


@attacks.register
def alie(key: Array, view: View, z: Number(words=("auto",)) = "auto") -> Array:
    """A little is enough: mu - z sigma. Knows its neighbours' messages, and n and f of the whole network."""
    seen = seen_by_attackers(view)
    z = alie_z(view.benign, view.byzantine) if isinstance(z, str) else z
    return seen.centre + seen.mean - z * _sigma(seen)


@attacks.register
def ipm(key: Array, view: View, eps: Number(0) = 0.5) -> Array:
    """Inner-product manipulation: -eps mu. Knows its neighbours' messages."""
    seen = seen_by_attackers(view)
    return -eps * (seen.centre + seen.mean)


def most_damaging(view: View, seen: Seen, direction: Array) -> Array:
    """mu + gamma direction, gamma >= 0 common to all, that moves the deployed rule's output farthest.

    Damage is the mean distance of what the benign nodes mix in from the mean of their honest neighbours.
    16 evaluations of the deployed rule: from 0 by steps that double while it improves, then on either
    side of the best by steps that shrink by 0.8.
    """
    ids, mask = (a[: view.benign] for a in view.graph)
    honest = mask & (ids < view.benign)
    rows = jnp.arange(view.benign)[:, None]
    near = jnp.zeros((view.benign, view.benign), bool).at[rows, jnp.where(honest, ids, 0)].max(honest)
    wanted = average_of(near, jnp.maximum(near.sum(1, keepdims=True), 1), seen.honest) + seen.centre

    def message(gamma):
        return seen.centre + seen.mean + gamma * direction

    def damage(gamma):
        mixed, _ = view.deployed(jnp.concatenate([view.own[: view.benign], message(gamma)]))
        moved = living(view, mixed[: view.benign] - wanted)
        return jnp.mean(jnp.sqrt(jnp.sum(jnp.square(moved), axis=1)))

    def evaluate(_, state):
        best, most, step, growing = state
        gamma = jnp.abs(best + step)
        found = damage(gamma)
        better = found > most
        growing = growing & better
        step = jnp.where(growing, 2 * step, jnp.where(better, step, -0.8 * step))
        return jnp.where(better, gamma, best), jnp.maximum(most, found), step, growing

    start = (jnp.zeros(()), damage(jnp.zeros(())), jnp.ones(()), jnp.ones((), bool))
    return message(lax.fori_loop(0, 15, evaluate, start)[0])


@attacks.register
def alie_optimised(key: Array, view: View) -> Array:
    """mu - gamma sigma, gamma by 16 trials for most damage.

    Knows all honest messages and the deployed rule, and the batches on which that evaluates messages.
    """
    seen = seen_by_attackers(view)
    return most_damaging(view, seen, -_sigma(seen))


@attacks.register
def ipm_optimised(key: Array, view: View) -> Array:
    """mu - gamma mu, gamma by 16 trials for most damage.

    Knows all honest messages and the deployed rule, and the batches on which that evaluates messages.
    """
    seen = seen_by_attackers(view)
    return most_damaging(view, seen, -(seen.centre + seen.mean))


def _check_surrogate(network, benign, byzantine, rounds, rule, surrogate: str, gamma: float | str):
    selects = rule.part.traits["selects"]
    if surrogate == "deployed" and gamma == "search" and not selects(**rule.of(selects)):
        raise ConfigError(
            f"mhamdi(surrogate=deployed) asks whether {rule} selects its message, but that rule mixes all "
            "messages per coordinate; use surrogate=krum"
        )
    return {}, []


@attacks.register(setup=_check_surrogate)
def mhamdi(
    key: Array,
    view: View,
    norm: Choice((2, "inf")) = 2,
    surrogate: Choice(("krum", "deployed")) = "krum",
    gamma: Number(0, words=("search",)) = "search",
) -> Array:
    """Hidden vulnerability: mu + gamma E, the largest gamma that goes unnoticed, searched every round.

    E is the seen coordinate of largest spread (norm 2), or all ones (inf). Unnoticed: chosen by Krum, or
    by the deployed rule if that selects, at a majority of the attacker's benign receivers, all Byzantine
    neighbours there assumed to send the same; gamma 0 if it never is. "deployed" runs that rule once for
    every attacker at each step of the search, about 20 of them. Knows its neighbours' messages, what its
    receivers hear from honest nodes and how many Byzantine neighbours they have; for "deployed" the rule, and
    the batches on which it evaluates messages.
    """
    seen = seen_by_attackers(view)
    if norm == 2:
        coordinate = linalg.argmax(_sigma(seen))
        direction = jax.nn.one_hot(coordinate, view.own.shape[1])
        along = seen.honest[:, coordinate].T  # [f, n_b]: E . x_j
        square = jnp.ones((view.byzantine, 1))
    else:
        direction = jnp.ones_like(seen.mean)
        along = jnp.broadcast_to(jnp.sum(seen.honest, axis=1)[None], (view.byzantine, view.benign))
        square = jnp.full((view.byzantine, 1), float(view.own.shape[1]))
    if isinstance(gamma, str):
        if surrogate == "krum":
            chosen = krum_chooses(view, seen, quadratics(seen, along, square))
        else:
            chosen = _deployed_chooses(view, seen, direction)
        gamma = largest(chosen, view.byzantine)[:, None]
    return seen.centre + seen.mean + gamma * direction


def _deployed_chooses(view: View, seen: Seen, direction: Array):
    """Like `krum_chooses`, by running the deployed rule once for every attacker."""
    ids, mask = (a[: view.benign] for a in view.graph)
    honest = view.own[: view.benign]

    def one(attacker, mean, direction, gamma):
        vector = (seen.centre[0] + mean + gamma * direction)[None]
        everyone = jnp.concatenate([honest, jnp.repeat(vector, view.byzantine, axis=0)])
        selected = view.deployed(everyone)[1]["selected"][: view.benign]
        receives = jnp.any(mask & (ids == view.benign + attacker), axis=1)
        taken = jnp.any(mask & (ids >= view.benign) & selected, axis=1)  # whoever of them sent it
        return 2 * jnp.sum(receives & taken) > jnp.sum(receives)

    def chosen(gamma):
        rows = (jnp.arange(view.byzantine), seen.mean, direction, gamma)
        return lax.map(lambda row: one(*row), rows)

    return chosen


DIRECTION = Choice(("std", "sign", "unit"))


def _direction(seen: Seen, name: str) -> Array:
    """[f, d] sigma, sign(mu) or mu / |mu|."""
    mean = seen.centre + seen.mean
    if name == "std":
        return _sigma(seen)
    if name == "sign":
        return jnp.sign(mean)
    return mean / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(mean), axis=1, keepdims=True)), 1e-30)


def _least_nonzero(square: Array) -> Array:
    return jnp.maximum(square, 1e-30)


def _widest(seen: Seen) -> Array:
    """[f] the largest squared distance between two seen models."""
    both = seen.adjacent[:, :, None] & seen.adjacent[:, None, :]
    return jnp.max(jnp.where(both, honest_distances(seen)[None], 0), axis=(1, 2))


def _against(seen: Seen, delta: Array) -> Quadratics:
    """The quadratics of mu - lambda delta, delta [f, d]."""
    along = -jnp.matmul(delta, seen.honest.T, precision=linalg.HIGHEST)
    return quadratics(seen, along, jnp.sum(jnp.square(delta), axis=1, keepdims=True))


@attacks.register
def min_max(key: Array, view: View, direction: DIRECTION = "std") -> Array:
    """mu - lambda delta, no farther from any seen vector than two seen ones are apart.

    The largest such lambda: each distance is a quadratic in lambda, so it is the smallest of their roots.
    Knows its neighbours' messages.
    """
    seen = seen_by_attackers(view)
    delta = _direction(seen, direction)
    base, slope, square = _against(seen, delta)
    square = _least_nonzero(square)
    room = jnp.maximum(jnp.square(slope) + square * (_widest(seen)[:, None] - base), 0)
    roots = jnp.where(seen.adjacent, (jnp.sqrt(room) - slope) / square, jnp.inf)
    strength = jnp.min(roots, axis=1, keepdims=True)
    return seen.centre + seen.mean - jnp.where(jnp.isfinite(strength), strength, 0) * delta


@attacks.register
def min_sum(key: Array, view: View, direction: DIRECTION = "std") -> Array:
    """mu - lambda delta, its squared distances to the seen vectors at most the largest such sum of theirs.

    The largest such lambda; mu is their mean, so the sum grows by lambda^2 |delta|^2 each. Knows its
    neighbours' messages.
    """
    seen = seen_by_attackers(view)
    delta = _direction(seen, direction)
    sums = jnp.matmul(seen.adjacent.astype(jnp.float32), honest_distances(seen), precision=linalg.HIGHEST)
    sums = jnp.where(seen.adjacent, sums, 0)
    # The distances to the mean sum to half the mean of those sums.
    room = jnp.max(sums, axis=1, keepdims=True) - jnp.sum(sums, axis=1, keepdims=True) / (2 * seen.count)
    square = _least_nonzero(jnp.sum(jnp.square(delta), axis=1, keepdims=True))
    return seen.centre + seen.mean - jnp.sqrt(jnp.maximum(room, 0) / (seen.count * square)) * delta


def _moves(view: View, seen: Seen) -> Array:
    """[f, d] sign of the mean update that the seen nodes are about to take."""
    update = living(view, view.update[: view.benign])
    return jnp.sign(average_of(seen.adjacent, seen.count, update))


@attacks.register
def fang_krum(key: Array, view: View) -> Array:
    """mu - lambda s against Krum, s the sign of the seen nodes' mean update; lambda halved until chosen.

    Chosen as for mhamdi: all Byzantine neighbours of a receiver are assumed to send the same. Starts from
    where the vector is as far from mu as the farthest seen one plus the widest seen pair, and gives up
    (lambda 0) after 40 halvings. Knows its neighbours' messages, the updates they are about to take, what its
    receivers hear from honest nodes and how many Byzantine neighbours they have.
    """
    seen = seen_by_attackers(view)
    moves = _moves(view, seen)
    distances = _against(seen, moves)
    chosen = krum_chooses(view, seen, distances)
    farthest = jnp.max(jnp.where(seen.adjacent, distances.base, 0), axis=1)
    start = (jnp.sqrt(_widest(seen)) + jnp.sqrt(farthest)) / math.sqrt(view.own.shape[1])

    def halve(state):
        halvings, strength, taken = state
        strength = jnp.where(taken, strength, strength / 2)
        return halvings + 1, strength, chosen(strength)

    def go_on(state):
        halvings, strength, taken = state
        return (halvings < 40) & jnp.any(~taken & (strength > 0))

    _, strength, taken = lax.while_loop(go_on, halve, (0, start, chosen(start)))
    return seen.centre + seen.mean - jnp.where(taken, strength, 0)[:, None] * moves


@attacks.register
def fang_trimmed(key: Array, view: View) -> Array:
    """Against median and trimmed mean: beyond the seen extreme, against the sign of the mean's move.

    Per coordinate uniform between the extreme and twice (or half) of it, away from the honest values. Knows
    its neighbours' messages and the updates they are about to take.
    """
    seen = seen_by_attackers(view)
    moves = _moves(view, seen)
    ids, mask = (a[view.benign :] for a in view.graph)
    mask = mask & (ids < view.benign)
    slots = [(view.own[: view.benign][ids[:, k] * mask[:, k]], mask[:, k, None]) for k in range(ids.shape[1])]
    low = high = jnp.zeros_like(moves)
    nobody = jnp.ones_like(mask[:, :1])
    for value, there in slots:
        low = jnp.where(there & (nobody | (value < low)), value, low)
        high = jnp.where(there & (nobody | (value > high)), value, high)
        nobody = nobody & ~there
    draw = jax.random.uniform(key, moves.shape)
    below = low - draw * jnp.where(low > 0, low / 2, -low)
    above = high + draw * jnp.where(high > 0, high, -high / 2)
    return jnp.where(moves > 0, below, above)


def _check_node(network, benign: int, byzantine: int, rounds: int, rule: Spec, node: int):
    if node >= benign:
        raise ConfigError(f"mimic(node={node}): there are only the benign nodes 0 to {benign - 1}")
    return {}, []


@attacks.register(setup=_check_node)
def mimic(key: Array, view: View, node: Number(0, integer=True) = 0) -> Array:
    """All copy one benign node, which so gets more weight than its due. Knows that node's message."""
    return jnp.repeat(view.own[node][None], view.byzantine, axis=0)


@attacks.register(trains=True, poison=lambda labels, classes, t: classes - 1 - labels)
def label_flip(key: Array, view: View) -> Array:
    """Honest in all but data: label y is trained on as classes - 1 - y. Knows its own model."""
    return view.own[view.benign :]
