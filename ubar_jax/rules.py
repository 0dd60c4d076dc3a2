"""Aggregation rules: one function each, from an Inbox to (what to mix in [r, d], info).

A rule that depends on how many neighbours are benign or Byzantine has a `count`: a function of the
degrees, run once on the host in exact arithmetic, whose per-node result is `inbox.count`. Its
arguments are the rule's. `limit` is the largest count that the rule is defined for with so many
neighbours; larger ones are clipped, and the user is told. Further traits: `alpha`, the rule's own
weight of x_i in the update, from the degrees; `pairs`, how many messages a node evaluates on its
batch, from (degree, count), by default none; `defends`, whether bad messages are dropped before the
rule sees them; `selects`, whether it accepts or refuses whole messages.

`info["selected"]` [r, K] says which slots were accepted, `info["candidates"]` which ones stage 1
kept; coordinate-wise rules have neither.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ubar_jax import linalg
from ubar_jax.registry import Choice, Number, Registry, Spec
from ubar_jax.types import Graph, Inbox

rules = Registry(
    "rule",
    given=1,
    traits={
        "count": None,
        "limit": None,
        "alpha": lambda degree: 0.5,
        "selects": lambda: True,
        "pairs": lambda degree, count: 0,
        "defends": True,
    },
    helpers=("count",),
)

RHO = Number(0, 1, open_low=True, words=("conservative", "oracle"))
SHARE = Number(0, 1, open_high=True, words=("oracle", None))
GUARD = 1e-9  # floor and ceil of products such as 0.29 * 100 and 10 * (1 - 0.7)


def benign_share(degree: np.ndarray, byzantine: np.ndarray, rho: float | str) -> np.ndarray | float:
    """rho_i: a number, "oracle" (each node's true share), "conservative" (one benign neighbour)."""
    return {"conservative": 1 / degree, "oracle": 1 - byzantine / degree}.get(rho, rho)


def benign_neighbours(degree: np.ndarray, byzantine: np.ndarray, rho: RHO = 0.4) -> np.ndarray:
    """[r] how many neighbours UBAR keeps: max(1, floor(rho_i |N_i|)).

    degree [r]; byzantine [r], the true number of Byzantine neighbours.
    """
    kept = np.floor(benign_share(degree, byzantine, rho) * degree + GUARD)
    return np.maximum(1, kept).astype(np.int32)


def tolerated(largest: float) -> Callable:
    """n_hat = ceil(|N_i| min(1 - rho_i, largest)), or from `byzantine`: a share, or the true count."""

    def n_hat(degree, known, rho: RHO = 0.4, byzantine: SHARE = None):
        if byzantine == "oracle":
            return known.astype(np.int32)
        share = np.minimum(1 - benign_share(degree, known, rho), largest) if byzantine is None else byzantine
        return np.ceil(degree * share - GUARD).astype(np.int32)

    return n_hat


def krum_limit(values):
    """The largest n_hat that Krum is defined for: 2 n_hat + 3 <= values."""
    return (values - 3) // 2


def bulyan_limit(values):
    """The largest n_hat that Bulyan is defined for: 4 n_hat + 3 <= values."""
    return (values - 3) // 4


def trim_limit(values):
    """The largest n_hat that leaves a value after trimming both ends: 2 n_hat + 1 <= values."""
    return (values - 1) // 2


def count_neighbours(rule: Spec, graph: Graph, receivers: int, benign: int) -> tuple[np.ndarray, ...]:
    """([r] degree, [r] true number of Byzantine neighbours, [r] the rule's count), on the host."""
    ids, mask = (np.asarray(a)[:receivers] for a in graph)
    degree, byzantine = mask.sum(1), (mask & (ids >= benign)).sum(1)
    counting = rule.part.traits["count"]
    count = np.zeros_like(degree) if counting is None else counting(degree, byzantine, **rule.of(counting))
    return degree, byzantine, count.astype(np.int32)


def aggregate(rule: Spec, inbox: Inbox) -> tuple[Array, dict[str, Array]]:
    """What every rule has in common: bad messages are dropped; nothing left, R = x_i."""
    if rule.part.traits["defends"]:
        inbox = linalg.drop_bad(inbox)
    mixed, info = rule(inbox)
    heard = jnp.any(inbox.graph.mask, axis=1)
    return jnp.where(heard[:, None], mixed, inbox.own), info


@rules.register(alpha=lambda degree: 1 / (degree + 1), defends=False)
def average(inbox: Inbox):
    """Plain mean of the neighbours, undefended; alpha 1 / (|N_i| + 1) makes it the mean with x_i."""
    return linalg.undefended_mean(inbox), {"selected": inbox.graph.mask}


@rules.register(count=benign_neighbours, pairs=lambda degree, count: count)
def ubar(inbox: Inbox):
    """UBAR: the rho |N_i| closest neighbours; of those, the ones whose loss is not above own."""
    near = closest(inbox)
    good = no_worse(inbox, near)
    return linalg.mean(inbox, good), {"candidates": near, "selected": good}


@rules.register(count=benign_neighbours)
def ubar_distance(inbox: Inbox):
    """Ablation of UBAR: its distance stage only."""
    near = closest(inbox)
    return linalg.mean(inbox, near), {"candidates": near, "selected": near}


@rules.register(pairs=lambda degree, count: degree)
def ubar_loss(inbox: Inbox):
    """Ablation of UBAR: its loss stage only, over all neighbours."""
    good = no_worse(inbox, inbox.graph.mask)
    return linalg.mean(inbox, good), {"selected": good}


def closest(inbox: Inbox) -> Array:
    """[r, K] the `count` neighbours closest to own model (UBAR, stage 1)."""
    near = linalg.ranks(linalg.own_distances(inbox)) < inbox.count[:, None]
    return near & inbox.graph.mask


def no_worse(inbox: Inbox, candidates: Array) -> Array:
    """[r, K] candidates whose loss is at most own; else the single best (UBAR, stage 2)."""
    losses = losses_of(inbox, candidates)
    good = candidates & (losses <= inbox.own_loss[:, None]) & jnp.isfinite(losses)
    best = (linalg.ranks(losses) == 0) & jnp.isfinite(losses)
    return jnp.where(jnp.any(good, axis=1)[:, None], good, best)


def losses_of(inbox: Inbox, candidates: Array) -> Array:
    """[r, K] loss of the candidates' messages on the receiver's own batch, +inf elsewhere.

    Only the kept candidates are evaluated, as one flat list of at most `inbox.pairs` pairs.
    """
    outside = candidates.shape  # where padding reads the last entry and writes nothing
    receiver, slot = jnp.nonzero(candidates, size=inbox.pairs, fill_value=outside)
    losses = inbox.loss_of(receiver, inbox.rows[receiver, slot])
    losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
    return jnp.full(outside, jnp.inf).at[receiver, slot].set(losses)


def clipped(inbox: Inbox, limit: Callable) -> Array:
    """[r] the count, at most what the rule is defined for with the messages that are left."""
    left = jnp.sum(inbox.graph.mask, axis=1)
    return jnp.clip(inbox.count, 0, jnp.maximum(limit(left), 0))


def krum_order(inbox: Inbox, n_hat: Array) -> Array:
    """[r, K] rank of every neighbour by Krum's score; equal scores go to the smallest sender id.

    The score of j is the sum of the left - n_hat - 2 (at least one) smallest squared distances from
    x_j to the other neighbours. The paper prints "+ 2"; Krum's own definition has - 2.
    """
    left = jnp.sum(inbox.graph.mask, axis=1)
    terms = jnp.maximum(left - n_hat - 2, 1)[:, None, None]
    nearest = jnp.sort(linalg.slot_distances(inbox), axis=2)
    counted = jnp.arange(nearest.shape[2])[None, None] < terms
    return linalg.ranks(_scores(inbox.graph.mask, nearest, counted))


def _scores(free: Array, nearest: Array, counted: Array) -> Array:
    """[r, K] sum of the counted entries; a slot that is not free comes after all."""
    scores = jnp.sum(jnp.where(counted, nearest, 0), axis=2)
    return jnp.where(free, jnp.minimum(scores, linalg.BIG), jnp.inf)


def recursive_krum(inbox: Inbox, n_hat: Array) -> Array:
    """[r, K] the left - 2 n_hat neighbours that Krum picks one after the other, each then removed.

    The score counts what is LEFT: max(1, left - n_hat - 2) terms. Distances are sorted once.
    """
    distances = linalg.slot_distances(inbox)
    order = jnp.argsort(distances, axis=2, stable=True)
    nearest = jnp.take_along_axis(distances, order, axis=2)
    wanted = jnp.sum(inbox.graph.mask, axis=1) - 2 * n_hat

    def pick(step, state):
        free, there = state
        terms = jnp.maximum(jnp.sum(free, axis=1) - n_hat - 2, 1)[:, None, None]
        counted = there & (jnp.cumsum(there, axis=2) <= terms)
        best = jnp.argmin(_scores(free, nearest, counted), axis=1)
        best = jnp.where(step < wanted, best, -1)
        free &= jnp.arange(free.shape[1])[None, :] != best[:, None]
        return free, there & (order != best[:, None, None])

    start = inbox.graph.mask, jnp.isfinite(nearest)
    free, _ = jax.lax.fori_loop(0, inbox.graph.mask.shape[1], pick, start)
    return inbox.graph.mask & ~free


@rules.register(count=tolerated(1 / 2), limit=krum_limit)
def dkrum(inbox: Inbox):
    """DKrum: the one neighbour with the smallest sum of squared distances to its nearest fellows."""
    best = (krum_order(inbox, clipped(inbox, krum_limit)) == 0) & inbox.graph.mask
    return linalg.only(inbox, best), {"selected": best}


def multi_krum_limit(values, m):
    """Krum's limit; no number is defined where there are fewer than m neighbours."""
    return krum_limit(values) if m == "auto" else np.where(m > values, -1, krum_limit(values))


@rules.register(count=tolerated(1 / 2), limit=multi_krum_limit)
def multi_krum(inbox: Inbox, m: Number(1, integer=True, words=("auto",)) = "auto"):
    """Multi-Krum: the mean of the m neighbours of best Krum score; auto is |N_i| - n_hat."""
    n_hat = clipped(inbox, krum_limit)
    wanted = jnp.sum(inbox.graph.mask, axis=1) - n_hat if m == "auto" else jnp.full_like(n_hat, m)
    best = (krum_order(inbox, n_hat) < wanted[:, None]) & inbox.graph.mask
    return linalg.mean(inbox, best), {"selected": best}


@rules.register(selects=lambda: False)
def dmedian(inbox: Inbox):
    """Dmedian: coordinate-wise median of the neighbours."""
    return linalg.coordinate_median(inbox, inbox.graph.mask), {}


@rules.register(count=tolerated(1 / 4), limit=bulyan_limit)
def dbulyan(inbox: Inbox):
    """DBulyan: recursive DKrum, then per coordinate the mean of the values nearest to the median."""
    n_hat = clipped(inbox, bulyan_limit)
    picked = recursive_krum(inbox, n_hat)
    keep = jnp.sum(picked, axis=1) - 2 * n_hat
    return linalg.mean_around_median(inbox, picked, keep), {"selected": picked}


VARIANT = Choice(("T", "M", "K", "B"))
BRIDGE_LIMITS = {"T": trim_limit, "M": trim_limit, "K": krum_limit, "B": bulyan_limit}


def bridge_tolerated(degree, known, variant: VARIANT = "T", rho: RHO = 0.4, byzantine: SHARE = None):
    """n_hat of a BRIDGE variant; the median needs none."""
    if variant == "M":
        return np.zeros_like(degree)
    return tolerated(1 / 4 if variant == "B" else 1 / 2)(degree, known, rho, byzantine)


def bridge_limit(values, variant: str, original: bool):
    """The limit of a variant; Krum over N_i and i has one value more."""
    return BRIDGE_LIMITS[variant](values + (original and variant != "T"))


@rules.register(
    count=bridge_tolerated,
    limit=bridge_limit,
    alpha=lambda degree, original: 0.0 if original else 0.5,
    selects=lambda variant: variant in "KB",
)
def bridge(inbox: Inbox, variant: VARIANT = "T", original: Choice((False, True)) = False):
    """BRIDGE-T(rimmed mean), -M(edian), -K(rum), -B(ulyan-like): recursive Krum, then trimmed mean.

    In this paper's frame over N_i with alpha 0.5; in the original over N_i and i with alpha 0. The
    original BRIDGE-T trims N_i and then always keeps x_i, as its text says; its public code may trim
    x_i too. In a tie x_i comes after all neighbours.
    """
    n_hat = clipped(inbox, partial(bridge_limit, variant=variant, original=original))
    slots = inbox.graph.mask.shape[1]
    if original and variant != "T":
        inbox = linalg.with_own(inbox)
    if variant == "T":
        mixed = linalg.trimmed_mean(inbox, inbox.graph.mask, n_hat)
        kept = (jnp.sum(inbox.graph.mask, axis=1) - 2 * n_hat)[:, None]
        return (mixed * kept + inbox.own) / (kept + 1) if original else mixed, {}
    if variant == "M":
        return linalg.coordinate_median(inbox, inbox.graph.mask), {}
    if variant == "K":
        best = (krum_order(inbox, n_hat) == 0) & inbox.graph.mask
        return linalg.only(inbox, best), {"selected": best[:, :slots]}
    picked = recursive_krum(inbox, n_hat)
    return linalg.trimmed_mean(inbox, picked, n_hat), {"selected": picked[:, :slots]}


@rules.register(selects=lambda: False)
def geometric_median(
    inbox: Inbox,
    smoothing: Number(0, open_low=True) = 1e-2,
    tolerance: Number(0, open_low=True) = 1e-5,
    steps: Number(1, integer=True) = 200,
):
    """Geometric median by smoothed Weiszfeld steps, until no weight moves by more than tolerance.

    Distances below smoothing times a typical one count as that; typical is the smallest of the messages'
    median distances to the others, which a minority cannot move. The first weights are those of a step from
    the message that has it: from the mean, an outlier at 1e12 is a long way back. The estimate is always a
    weighted mean, z = sum w_k x_k, so that |z - x_j|^2 follows from the inner products of the messages: no
    step touches a model, only the last mean does. Messages whose distances would overflow have no weight.
    """
    grams = linalg.slot_grams(inbox)
    norms = jnp.diagonal(grams, axis1=1, axis2=2)
    mask = inbox.graph.mask & (norms < 1e30)
    pairs = mask[:, :, None] & mask[:, None, :]
    grams, norms = jnp.where(pairs, grams, 0), jnp.where(mask, norms, 0)
    left = jnp.sum(mask, axis=1)

    between = jnp.maximum(norms[:, :, None] + norms[:, None, :] - 2 * grams, 0)

    def squares(weights):
        """[r, K] |z - x_k|^2, from inner products or from distances, whichever cancels less.

        Distances are exact where z is close to a message, inner products where there are outliers.
        """
        product, apart = (
            jnp.einsum("rkl,rl->rk", matrix, weights, precision=linalg.HIGHEST) for matrix in (grams, between)
        )
        total, spread = (jnp.sum(weights * by, axis=1, keepdims=True) for by in (product, apart))
        by_products, by_distances = norms - 2 * product + total, apart - spread / 2
        better = apart + spread / 2 < norms + 2 * jnp.abs(product) + jnp.abs(total)
        return jnp.maximum(jnp.where(better, by_distances, by_products), 0)

    others = pairs & ~jnp.eye(mask.shape[1], dtype=bool)[None]
    ordered = jnp.sort(jnp.where(others, between, linalg.BIG), axis=2)
    middle = jnp.maximum(left - 2, 0)[:, None, None] // 2
    medians = jnp.take_along_axis(ordered, middle, axis=2)[:, :, 0]
    medians = jnp.where(mask, medians, linalg.BIG)
    typical = jnp.where(left > 1, jnp.sqrt(jnp.min(medians, axis=1)), 1)[:, None] + 1e-30

    def inverse(squares, floor):
        weights = mask / jnp.maximum(jnp.sqrt(squares), floor)
        return weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1e-30)

    def step(state):
        count, weights, moved = state
        new = inverse(squares(weights), smoothing * typical)
        new = jnp.where((moved > tolerance)[:, None], new, weights)
        return count + 1, new, jnp.max(jnp.abs(new - weights), axis=1)

    def go_on(state):
        return (state[0] < steps) & jnp.any(state[2] > tolerance)

    medoid = jnp.argmin(medians, axis=1)[:, None, None]
    start = inverse(jnp.take_along_axis(between, medoid, axis=1)[:, 0], typical)
    state = (0, start, jnp.full(len(mask), jnp.inf))
    _, weights, _ = jax.lax.while_loop(go_on, step, state)
    return jnp.where((left > 0)[:, None], linalg.weighted_mean(inbox, weights), inbox.own), {}
