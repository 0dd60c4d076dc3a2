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
