"""The rules and attacks as plain NumPy loops, written from the paper, to be read next to it.

A rule sees one node (`ubar_jax.testing.Node`) in float64 and returns (vector, accepted messages or
None); the messages are those left after dropping bad ones, by ascending sender id. An attack sees
(key, View) and returns one vector a Byzantine node.
"""

import math

import jax
import numpy as np

GUARD = 1e-9


# ---------------------------------------------------------------------------------------- rules


def average(node):
    total = np.zeros_like(node.own)
    for message in node.messages:
        total = total + message
    return total / len(node.messages), list(range(len(node.messages)))


def _kept(node, rho):
    if rho == "conservative":
        return 1
    if rho == "oracle":
        rho = (node.degree - node.byzantine) / node.degree
    return max(1, math.floor(rho * node.degree + GUARD))


def _stage_1(node, rho):
    distance = [np.linalg.norm(message - node.own) for message in node.messages]
    order = sorted(range(len(distance)), key=lambda j: (distance[j], j))
    return sorted(order[: _kept(node, rho)])


def _stage_2(node, candidates):
    loss = {j: node.loss(node.messages[j]) for j in candidates}
    good = [j for j in candidates if loss[j] <= node.own_loss]
    return good or [min(candidates, key=lambda j: (loss[j], j))]


def _mean(node, chosen):
    return np.mean([node.messages[j] for j in chosen], axis=0), chosen


def ubar(node, rho):
    return _mean(node, _stage_2(node, _stage_1(node, rho)))


def ubar_distance(node, rho):
    return _mean(node, _stage_1(node, rho))


def ubar_loss(node):
    return _mean(node, _stage_2(node, list(range(len(node.messages)))))


def _n_hat(node, rho, byzantine, central, values, need):
    """n_hat, clipped so that need * n_hat + (3, or 1 for trimming) <= values."""
    if byzantine == "oracle":
        wanted = node.byzantine
    else:
        if rho == "conservative":
            rho = 1 / node.degree
        if rho == "oracle":
            rho = (node.degree - node.byzantine) / node.degree
        share = min(1 - rho, central) if byzantine is None else byzantine
        wanted = math.ceil(node.degree * share - GUARD)
    spare = 3 if need != "trim" else 1
    factor = {"krum": 2, "bulyan": 4, "trim": 2}[need]
    return max(0, min(wanted, (values - spare) // factor))


def _krum_scores(vectors, ids, n_hat):
    """Krum's score of every id among the ids left."""
    terms = max(1, len(ids) - n_hat - 2)
    scores = {}
    for j in ids:
        distances = sorted(np.sum((vectors[j] - vectors[k]) ** 2) for k in ids if k != j)
        scores[j] = sum(distances[:terms])
    return scores


def _best(scores):
    """The smallest score, and of equal ones (to float32's precision of a tie) the smallest id."""
    return min(scores, key=lambda j: (scores[j], j))


def dkrum(node, rho, byzantine):
    n_hat = _n_hat(node, rho, byzantine, 1 / 2, len(node.messages), "krum")
    best = _best(_krum_scores(node.messages, range(len(node.messages)), n_hat))
    return node.messages[best], [best]


def multi_krum(node, m, rho, byzantine):
    k = len(node.messages)
    n_hat = _n_hat(node, rho, byzantine, 1 / 2, k, "krum")
    scores = _krum_scores(node.messages, range(k), n_hat)
    order = sorted(range(k), key=lambda j: (scores[j], j))
    return _mean(node, sorted(order[: k - n_hat if m == "auto" else m]))


def dmedian(node):
    return np.median(node.messages, axis=0), None


def _recursive_krum(vectors, n_hat):
    left, picked = list(range(len(vectors))), []
    while len(picked) < len(vectors) - 2 * n_hat:
        best = _best(_krum_scores(vectors, left, n_hat))
        picked.append(best)
        left.remove(best)
    return sorted(picked)


def dbulyan(node, rho, byzantine):
    n_hat = _n_hat(node, rho, byzantine, 1 / 4, len(node.messages), "bulyan")
    picked = _recursive_krum(node.messages, n_hat)
    beta = len(picked) - 2 * n_hat
    result = np.empty_like(node.own)
    for c in range(len(result)):
        values = sorted(node.messages[j][c] for j in picked)
        twice_median = values[(len(values) - 1) // 2] + values[len(values) // 2]
        near = sorted((abs(2 * v - twice_median), v) for v in values)  # equally near: the smaller
        result[c] = np.mean([v for _, v in near[:beta]])
    return result, picked


def _trimmed_mean(vectors, n_hat):
    ordered = np.sort(vectors, axis=0)
    return ordered[n_hat : len(ordered) - n_hat].mean(0)


def bridge(node, variant, original, rho, byzantine):
    vectors = list(node.messages)
    if variant == "T":
        n_hat = _n_hat(node, rho, byzantine, 1 / 2, len(vectors), "trim")
        ordered = np.sort(vectors, axis=0)[n_hat : len(vectors) - n_hat]
        if original:
            return (ordered.sum(0) + node.own) / (len(vectors) - 2 * n_hat + 1), None
        return ordered.mean(0), None
    if original:
        vectors.append(node.own)
    if variant == "M":
        return np.median(vectors, axis=0), None
    if variant == "K":
        n_hat = _n_hat(node, rho, byzantine, 1 / 2, len(vectors), "krum")
        best = _best(_krum_scores(vectors, range(len(vectors)), n_hat))
        return vectors[best], [best] if best < len(node.messages) else []
    n_hat = _n_hat(node, rho, byzantine, 1 / 4, len(vectors), "bulyan")
    picked = _recursive_krum(vectors, n_hat)
    mixed = _trimmed_mean([vectors[j] for j in picked], n_hat)
    return mixed, [j for j in picked if j < len(node.messages)]


def geometric_median(node, smoothing, tolerance, steps):
    z = node.messages.mean(0)
    floor = smoothing * math.sqrt(np.mean(np.sum((node.messages - z) ** 2, axis=1))) + 1e-30
    weights = np.full(len(node.messages), 1 / len(node.messages))
    for _ in range(steps):
        distances = [max(np.linalg.norm(message - z), floor) for message in node.messages]
        new = np.array([1 / distance for distance in distances])
        new = new / new.sum()
        moved = np.abs(new - weights).max()
        weights = new
        z = sum(w * message for w, message in zip(weights, node.messages, strict=True))
        if moved <= tolerance:
            break
    return z, None


# -------------------------------------------------------------------------------------- attacks


def none(key, view):
    return np.zeros((view.byzantine, view.own.shape[1]))


def gaussian(key, view, std):
    return std * np.asarray(jax.random.normal(key, (view.byzantine, view.own.shape[1])))


def bit_flip(key, view):
    return np.stack([-view.own[view.benign + a] for a in range(view.byzantine)])


def nonfinite(key, view):
    values = [np.nan, np.inf, -np.inf, 1e30]
    rows = [values[(int(view.t) + a) % 4] for a in range(view.byzantine)]
    return np.repeat(np.array(rows)[:, None], view.own.shape[1], axis=1)
