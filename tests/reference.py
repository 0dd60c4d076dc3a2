"""Rules and attacks as plain NumPy loops, written from the paper, to be compared with it line by line.

A rule sees one node (`ubar_jax.testing.Node`) in float64 and returns (vector, accepted messages or
None); the messages are those left after dropping bad ones, by ascending sender id. An attack sees
(key, View) and returns one vector per Byzantine node, or per benign receiver if it is tailored.
"""

import math
from statistics import NormalDist

import jax
import numpy as np
import scipy.stats

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
    """Krum's score of each remaining id."""
    terms = max(1, len(ids) - n_hat - 2)
    scores = {}
    for j in ids:
        distances = sorted(np.sum((vectors[j] - vectors[k]) ** 2) for k in ids if k != j)
        scores[j] = sum(distances[:terms])
    return scores


def _best(scores):
    """The id with the smallest score; of equal scores the smallest id."""
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
        near = sorted((abs(2 * v - twice_median), v) for v in values)  # of equally near values the smaller
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
    x, k = node.messages, len(node.messages)

    def weigh(z, floor):
        weights = np.array([1 / max(np.linalg.norm(message - z), floor) for message in x])
        return weights / weights.sum()

    medians = [0.0]
    if k > 1:
        medians = [
            sorted(np.linalg.norm(x[i] - x[j]) for j in range(k) if j != i)[(k - 2) // 2] for i in range(k)
        ]
    typical = (min(medians) if k > 1 else 1.0) + 1e-30
    weights = weigh(x[int(np.argmin(medians))], typical)
    z = weights @ x
    for _ in range(steps):
        new = weigh(z, smoothing * typical)
        moved = np.abs(new - weights).max()
        weights = new
        z = weights @ x
        if moved <= tolerance:
            break
    return z, None


def gossip(node):
    result = (1 - sum(node.weights)) * node.own
    for weight, message in zip(node.weights, node.messages, strict=True):
        result = result + weight * message
    return result, list(range(len(node.messages)))


def local(node):
    return node.own, []


def _mean_with_own(node, chosen):
    return np.mean([node.own] + [node.messages[j] for j in chosen], axis=0), sorted(chosen)


def oracle(node):
    return _mean_with_own(node, [j for j in range(len(node.messages)) if node.benign[j]])


def _tolerated(node, rho, byzantine):
    """n_hat, clipped to the number of messages."""
    return min(_n_hat(node, rho, byzantine, 1 / 2, 10**6, "trim"), len(node.messages))


def _distances(node):
    return [np.linalg.norm(message - node.own) for message in node.messages]


def _clip(vector, tau):
    length = np.linalg.norm(vector)
    return vector if length <= tau else vector * (tau / length)


def scclip(node, tau, rho, byzantine):
    distance, weights = _distances(node), list(node.weights)
    if tau == "oracle":
        honest = [j for j in range(len(weights)) if node.benign[j]]
        lying = sum(weights[j] for j in range(len(weights)) if not node.benign[j])
    elif tau == "adaptive":
        lying = sum(sorted(weights, reverse=True)[: _n_hat(node, rho, byzantine, 1 / 2, 10**6, "trim")])
        honest, reached = [], 1 - sum(weights)
        for j in sorted(range(len(weights)), key=lambda j: (distance[j], j)):
            reached += weights[j]
            if reached < 1 - lying - 1e-6:
                honest.append(j)
    if isinstance(tau, str):
        spread = sum(weights[j] * distance[j] ** 2 for j in honest)
        tau = math.sqrt(spread / lying) if lying > 1e-6 else math.inf
    result = node.own
    for weight, message in zip(weights, node.messages, strict=True):
        result = result + weight * _clip(message - node.own, tau)
    return result, None


def centred_clipping(node, centre, tau, steps):
    centre = node.own if centre is None else centre  # the first centre is the first own model
    for _ in range(steps):
        centre = centre + np.mean([_clip(x - centre, tau) for x in [*node.messages, node.own]], axis=0)
    return centre, None, centre


def nna(node, rho, byzantine):
    distance = _distances(node)
    order = sorted(range(len(distance)), key=lambda j: (distance[j], j))
    return _mean_with_own(node, order[: len(order) - _tolerated(node, rho, byzantine)])


def _drop_farthest(points, weights, drops):
    """Positions left after dropping, `drops` times, the one farthest from the rest's weighted mean.

    The last point is never dropped. Distances are sums over the rest, so that near ties are the same as ours.
    """
    left = list(range(len(points)))
    for _ in range(drops):
        far = {j: sum(weights[k] * np.sum((points[j] - points[k]) ** 2) for k in left) for j in left[:-1]}
        left.remove(min(j for j in far if far[j] >= (1 - 1e-5) * max(far.values())))
    return left[:-1]


def ios(node, rho, byzantine):
    points, weights = [*node.messages, node.own], [*node.weights, 1 - sum(node.weights)]
    left = _drop_farthest(points, weights, _tolerated(node, rho, byzantine))
    chosen = [*left, len(points) - 1]
    return np.average([points[j] for j in chosen], axis=0, weights=[weights[j] for j in chosen]), left


def faba(node, rho, byzantine):
    points, weights = [*node.messages, node.own], [1] * len(node.messages) + [0]
    return _mean_with_own(node, _drop_farthest(points, weights, _tolerated(node, rho, byzantine)))


def balance(node, gamma, kappa):
    radius = gamma * math.exp(-kappa * node.t / node.rounds) * np.linalg.norm(node.own)
    near = [j for j, distance in enumerate(_distances(node)) if distance <= radius]
    return _mean(node, near) if near else (node.own, [])


def zeno(node, ratio, rho, byzantine):
    score = {}
    for j, distance in enumerate(_distances(node)):
        gradient = distance / node.learning_rate
        penalty = node.learning_rate / ratio * gradient**2
        score[j] = node.own_loss - node.loss(node.messages[j]) - penalty
    order = sorted(score, key=lambda j: (-score[j], j))
    best = sorted(order[: len(order) - _tolerated(node, rho, byzantine)])
    return _mean(node, best) if best else (node.own, [])


def zeno_pp(node, memory, rho, eps, every):
    v = node.gradient() if node.t % every == 0 else memory
    rate, steps = node.learning_rate, {}
    for j, message in enumerate(node.messages):
        g = (node.own - message) / rate
        apart = np.linalg.norm(node.own - message) > 1e-5 * np.linalg.norm(node.own)
        g = g * np.linalg.norm(v) / np.linalg.norm(g) if apart else 0 * g
        if rate * (v @ g) - rho * (g @ g) + rate * eps >= 0:
            steps[j] = g
    mixed = node.own - rate * np.mean(list(steps.values()), axis=0) if steps else node.own
    return mixed, list(steps), v


def loss_gate(node, margin):
    limit = margin * math.log(node.classes)
    losses = [node.loss(message) for message in node.messages]
    good = [j for j, loss in enumerate(losses) if loss <= node.own_loss and loss < limit]
    return _mean(node, good) if good else (node.own, [])


def ubar_swapped(node):
    good = _stage_2(node, list(range(len(node.messages))))
    distance = _distances(node)
    order = sorted(good, key=lambda j: (distance[j], j))
    return _mean(node, sorted(order[: (len(good) + 1) // 2]))


def byrdie(node, blocks, rho, byzantine):
    size = math.ceil(len(node.own) / blocks)
    block = range(len(node.own))[(node.t % blocks) * size :][:size]
    n_hat = _n_hat(node, rho, byzantine, 1 / 2, len(node.messages), "trim")
    result = node.own - node.update
    for c in block:
        values = sorted(message[c] for message in node.messages)[n_hat : len(node.messages) - n_hat]
        result[c] = np.mean([*values, node.own[c]])
    return result, None


def afa(node, record, of, xi, slower):
    record = record or {}
    for sender in node.ids:
        record.setdefault(sender, [3, 3, False])
    x = node.messages - node.own if of == "step" else node.messages
    known = [record[sender] for sender in node.ids]

    def mean(vectors, chosen):
        p = [known[j][0] / (known[j][0] + known[j][1]) for j in chosen]
        return sum(w * vectors[j] for w, j in zip(p, chosen, strict=True)) / sum(p)

    there = [j for j in range(len(x)) if not known[j][2]]
    kept, dropped = list(there), True
    while dropped and kept:
        m = mean(x, kept)
        similar = {j: m @ x[j] / (np.linalg.norm(m) * np.linalg.norm(x[j]) + 1e-30) for j in kept}
        values = list(similar.values())
        middle, spread = np.median(values), np.std(values)
        if np.mean(values) < middle:
            dropped = [j for j in kept if middle - similar[j] - xi * spread > 1e-6]
        else:
            dropped = [j for j in kept if similar[j] - middle - xi * spread > 1e-6]
        kept = [j for j in kept if j not in dropped]
        xi += slower
    for j in there:
        known[j][0 if j in kept else 1] += 1
        known[j][2] = bool(scipy.stats.beta.cdf(0.5, known[j][0], known[j][1]) > 0.95)
    kept = [j for j in kept if not known[j][2]]
    return mean(node.messages, kept) if kept else node.own, kept, record


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


def _neighbours(view, node):
    ids, mask = np.asarray(view.graph.neighbours[node]), np.asarray(view.graph.mask[node])
    return [int(j) for j in ids[mask]]


def _honest(view):
    return np.asarray(view.own, float)[: view.benign]


def _seen(view, attacker):
    """(models, ids) of the attacker's benign neighbours; all honest models and no ids if it has none."""
    ids = [j for j in _neighbours(view, view.benign + attacker) if j < view.benign]
    return _honest(view)[ids] if ids else _honest(view), ids


def _each_attacker(view, vector):
    return np.stack([vector(a, *_seen(view, a)) for a in range(view.byzantine)])


def alie(key, view, z):
    n, f = view.benign + view.byzantine, view.byzantine
    if z == "auto":
        s = max(1, math.floor(n / 2 + 1) - f)
        z = NormalDist().inv_cdf((n - f - s) / (n - f))
    return _each_attacker(view, lambda a, seen, ids: seen.mean(0) - z * seen.std(0))


def ipm(key, view, eps):
    return _each_attacker(view, lambda a, seen, ids: -eps * seen.mean(0))


def _most_damaging(view, direction):
    """Line search for gamma: 16 evaluations of the deployed rule."""
    honest = _honest(view)
    wanted = [
        honest[[j for j in _neighbours(view, i) if j < view.benign]].mean(0) for i in range(view.benign)
    ]

    def messages(gamma):
        return _each_attacker(view, lambda a, seen, ids: seen.mean(0) + gamma * direction(seen))

    def damage(gamma):
        sent = np.concatenate([honest, messages(gamma)]).astype(np.float32)
        mixed = np.asarray(view.deployed(sent)[0], float)[: view.benign]
        return np.mean([np.linalg.norm(m - w) for m, w in zip(mixed, wanted, strict=True)])

    best, most, step, growing = 0.0, damage(0.0), 1.0, True
    for _ in range(15):
        gamma = abs(best + step)
        found = damage(gamma)
        better = found > most
        growing = growing and better
        if better:
            best, most = gamma, found
        step = 2 * step if growing else step if better else -0.8 * step
    return messages(best)


def alie_optimised(key, view):
    return _most_damaging(view, lambda seen: -seen.std(0))


def ipm_optimised(key, view):
    return _most_damaging(view, lambda seen: -seen.mean(0))


def krum_takes(view, attacker, vector):
    """Whether Krum chooses the vector at a majority of the attacker's benign receivers."""
    honest = _honest(view)
    receivers = [i for i in _neighbours(view, view.benign + attacker) if i < view.benign]
    votes = 0
    for i in receivers:
        ids = _neighbours(view, i)
        messages = [honest[j] if j < view.benign else vector for j in ids]
        n_hat = max(0, min(math.ceil(len(ids) / 2), (len(ids) - 3) // 2))
        best = _best(_krum_scores(messages, range(len(ids)), n_hat))
        votes += ids[best] >= view.benign
    return 2 * votes > len(receivers)


def deployed_takes(view, attacker, vector):
    sent = np.concatenate([_honest(view), np.tile(vector, (view.byzantine, 1))]).astype(np.float32)
    selected = np.asarray(view.deployed(sent)[1]["selected"])
    sender, votes, receivers = view.benign + attacker, 0, 0
    for i in range(view.benign):
        ids, mask = np.asarray(view.graph.neighbours[i]), np.asarray(view.graph.mask[i])
        if not (mask & (ids == sender)).any():
            continue
        receivers += 1
        votes += (mask & selected[i] & (ids >= view.benign)).any()
    return 2 * votes > receivers


def largest_gamma(takes, cap=1e6):
    low, high = 0.0, 1.0
    while high <= 2**20 and takes(high):
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        if takes(middle):
            low = middle
        else:
            high = middle
    return min(low, cap)


def mhamdi(key, view, norm, surrogate, gamma):
    takes = krum_takes if surrogate == "krum" else deployed_takes

    def vector(a, seen, ids):
        mean = seen.mean(0)
        direction = np.ones_like(mean)
        if norm == 2:
            direction = np.zeros_like(mean)
            direction[np.argmax(seen.std(0))] = 1
        size = gamma
        if gamma == "search":
            size = largest_gamma(lambda g: takes(view, a, mean + g * direction))
        return mean + size * direction

    return _each_attacker(view, vector)


def _delta(seen, direction):
    mean = seen.mean(0)
    return {"std": seen.std(0), "sign": np.sign(mean), "unit": mean / np.linalg.norm(mean)}[direction]


def min_max(key, view, direction):
    def vector(a, seen, ids):
        mean, delta = seen.mean(0), _delta(seen, direction)
        widest = max(np.linalg.norm(x - y) for x in seen for y in seen)
        takes = lambda g: max(np.linalg.norm(mean - g * delta - x) for x in seen) <= widest  # noqa: E731
        return mean - (largest_gamma(takes) if len(ids) > 1 else 0) * delta

    return _each_attacker(view, vector)


def min_sum(key, view, direction):
    def vector(a, seen, ids):
        mean, delta = seen.mean(0), _delta(seen, direction)
        most = max(sum(np.sum((x - y) ** 2) for y in seen) for x in seen)
        takes = lambda g: sum(np.sum((mean - g * delta - x) ** 2) for x in seen) <= most  # noqa: E731
        return mean - (largest_gamma(takes) if len(ids) > 1 else 0) * delta

    return _each_attacker(view, vector)


def _moves(view, ids):
    return np.sign(np.asarray(view.update, float)[ids].mean(0))


def fang_krum(key, view):
    def vector(a, seen, ids):
        mean, moves = seen.mean(0), _moves(view, ids)
        widest = max(np.linalg.norm(x - y) for x in seen for y in seen)
        farthest = max(np.linalg.norm(mean - x) for x in seen)
        strength = (widest + farthest) / math.sqrt(len(mean))
        for _ in range(40):
            if krum_takes(view, a, mean - strength * moves):
                return mean - strength * moves
            strength /= 2
        return mean

    return _each_attacker(view, vector)


def fang_trimmed(key, view):
    draw = np.asarray(jax.random.uniform(key, (view.byzantine, view.own.shape[1])))

    def vector(a, seen, ids):
        moves, result = _moves(view, ids), []
        for c, u in enumerate(draw[a]):
            low, high = seen[:, c].min(), seen[:, c].max()
            if moves[c] > 0:
                far = low / 2 if low > 0 else 2 * low
                result.append(low + u * (far - low))
            else:
                far = 2 * high if high > 0 else high / 2
                result.append(high + u * (far - high))
        return np.array(result)

    return _each_attacker(view, vector)


def mimic(key, view, node):
    return np.stack([_honest(view)[node]] * view.byzantine)


def label_flip(key, view):
    return np.asarray(view.own)[view.benign :]


def _metropolis(view, i, j):
    return 1 / (1 + max(len(_neighbours(view, i)), len(_neighbours(view, j))))


def _split(view, i):
    ids = _neighbours(view, i)
    return [j for j in ids if j < view.benign], [j for j in ids if j >= view.benign]


def dissensus(key, view, strength):
    honest, rows = _honest(view), []
    for i in range(view.benign):
        good, bad = _split(view, i)
        pull = sum(_metropolis(view, i, j) * (honest[j] - honest[i]) for j in good)
        rows.append(honest[i] - strength * pull / sum(_metropolis(view, i, j) for j in bad) if bad else None)
    return rows


def isolation(key, view):
    honest, rows = _honest(view), []
    for i in range(view.benign):
        good, bad = _split(view, i)
        weight = {j: _metropolis(view, i, j) for j in good + bad}
        total = sum(weight[j] * honest[j] for j in good) + (1 - sum(weight.values())) * honest[i]
        rows.append((honest[i] - total) / sum(weight[j] for j in bad) if bad else None)
    return rows


def sleeper(key, view, memory, attack, start):
    honest = list(np.asarray(view.own)[view.benign :])
    if attack == "dissensus":  # broadcast rows, then one row per receiver for when it is awake
        return honest + dissensus(key, view, 1.5), memory
    return (alie(key, view, "auto") if int(view.t) >= start and attack == "alie" else honest), memory


def theorem1(key, view, target, size, start, gain):
    sent = np.array(view.own, float)[view.benign :]
    if int(view.t) == start:
        sent[0] += size * gain
    return sent


def frozen(key, view, memory):
    memory = np.asarray(view.own)[0] if memory is None else memory  # in the first round all models are x_0
    return np.stack([memory] * view.byzantine), memory


def time_coupled(key, view, memory, z):
    before = memory or [np.stack([np.asarray(view.own)[0]] * view.byzantine)] * 2
    n, f = view.benign + view.byzantine, view.byzantine
    if z == "auto":
        z = NormalDist().inv_cdf((n - f - max(1, math.floor(n / 2 + 1) - f)) / (n - f))
    moved = np.sign(before[1] - before[0])
    sent = _each_attacker(view, lambda a, seen, ids: seen.mean(0) - z * seen.std(0) * moved[a])
    return sent, [before[1], _each_attacker(view, lambda a, seen, ids: seen.mean(0))]
