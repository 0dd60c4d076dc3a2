"""The serial simulator that ubar_jax is measured against: plain torch, one node after the other.

A rule is `rule(own [d], messages [k, d], count, own_loss, loss) -> [d]`: `count` is the node's n_hat, or
how many neighbours UBAR keeps, and `loss` a function of one model on the node's own batch. Nothing is
shared between nodes, and bad messages are not looked for: that is work which ubar_jax does on top.
"""

import torch
import torch.nn.functional as F


def average(own, messages, count, own_loss, loss):
    return messages.mean(0)


def ubar(own, messages, count, own_loss, loss):
    distances = (messages - own).norm(dim=1)
    near = distances.argsort(stable=True)[:count].sort().values
    losses = torch.stack([loss(messages[j]) for j in near])
    good = near[losses <= own_loss]
    return messages[good].mean(0) if len(good) else messages[near[losses.argmin()]]


def ubar_distance(own, messages, count, own_loss, loss):
    return messages[(messages - own).norm(dim=1).argsort(stable=True)[:count]].mean(0)


def ubar_loss(own, messages, count, own_loss, loss):
    losses = torch.stack([loss(message) for message in messages])
    good = losses <= own_loss
    return messages[good].mean(0) if good.any() else messages[losses.argmin()]


def krum_scores(squares, n_hat):
    """Sums of each row's k - n_hat - 2 (at least one) smallest squared distances to the others."""
    k = len(squares)
    terms = min(k, max(1, k - n_hat - 2) + 1)  # one more: the zero from a message to itself
    return squares.topk(terms, largest=False).values.sum(1)


def dkrum(own, messages, count, own_loss, loss):
    n_hat = clip(count, (len(messages) - 3) // 2)
    return messages[krum_scores(torch.cdist(messages, messages).square(), n_hat).argmin()]


def multi_krum(own, messages, count, own_loss, loss):
    n_hat = clip(count, (len(messages) - 3) // 2)
    scores = krum_scores(torch.cdist(messages, messages).square(), n_hat)
    return messages[scores.argsort(stable=True)[: len(messages) - n_hat]].mean(0)


def dmedian(own, messages, count, own_loss, loss):
    return middle(messages.sort(dim=0).values)


def dbulyan(own, messages, count, own_loss, loss):
    n_hat = clip(count, (len(messages) - 3) // 4)
    squares = torch.cdist(messages, messages).square()
    left, picked = list(range(len(messages))), []
    while len(picked) < len(messages) - 2 * n_hat:
        best = krum_scores(squares[left][:, left], n_hat).argmin()
        picked.append(left.pop(best))
    ordered = messages[picked].sort(dim=0).values
    deviation = (ordered - middle(ordered)).abs()
    near = deviation.topk(len(picked) - 2 * n_hat, dim=0, largest=False).indices
    return ordered.gather(0, near).mean(0)


def bridge(own, messages, count, own_loss, loss):
    n_hat = clip(count, (len(messages) - 1) // 2)
    return messages.sort(dim=0).values[n_hat : len(messages) - n_hat].mean(0)


def geometric_median(own, messages, count, own_loss, loss, smoothing=1e-2, tolerance=1e-5, steps=200):
    if len(messages) == 1:
        return messages[0]
    distances = torch.cdist(messages, messages)
    medians = distances.sort(dim=1).values[:, 1 + (len(messages) - 2) // 2]  # after the zero to itself
    typical = float(medians.min()) + 1e-30
    weights = 1 / distances[medians.argmin()].clamp(min=typical)
    weights = weights / weights.sum()
    z = weights @ messages
    for _ in range(steps):
        new = 1 / (messages - z).norm(dim=1).clamp(min=smoothing * typical)
        new = new / new.sum()
        moved = (new - weights).abs().max()
        weights = new
        z = weights @ messages
        if moved <= tolerance:
            break
    return z


def clip(count, limit):
    """n_hat, at most what the rule is defined for."""
    return max(0, min(int(count), limit))


def middle(ordered):
    """The median of sorted values, mean of the middle two if even."""
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


RULES = {
    rule.__name__: rule
    for rule in (
        average,
        ubar,
        ubar_distance,
        ubar_loss,
        dkrum,
        multi_krum,
        dmedian,
        dbulyan,
        bridge,
        geometric_median,
    )
}


def aggregate(rule, models, neighbours, counts, own_losses, batches, loss):
    """One aggregation of the whole network, node by node: a list of what each node mixes in.

    models: a vector a node; neighbours: a list of ids a node; batches: (x, y) a node; loss(model, x, y).
    """
    mixed = []
    with torch.no_grad():
        for i, ids in enumerate(neighbours):
            messages = torch.stack([models[j] for j in ids])
            x, y = batches[i]
            mixed.append(
                rule(models[i], messages, counts[i], own_losses[i], lambda v, x=x, y=y: loss(v, x, y))
            )
    return mixed


# Models as functions of one vector, in ubar_jax's layout: per layer bias, then kernel [in, out] or
# [k, k, in, out]. Images are [b, C, H, W].


def mlp_loss(vector, x, y):
    b1, w1, b2, w2 = _split(vector, [(100,), (x[0].numel(), 100), (10,), (100, 10)])
    hidden = F.relu(torch.addmm(b1, x.flatten(1), w1))
    return F.cross_entropy(torch.addmm(b2, hidden, w2), y)


def cnn_loss(vector, x, y):
    convolutions = [(16,), (3, 3, 3, 16), (64,), (4, 4, 16, 64)]
    dense = [(384,), (2304, 384), (192,), (384, 192), (10,), (192, 10)]
    b1, w1, b2, w2, *head = _split(vector, convolutions + dense)
    x = F.relu(F.max_pool2d(F.conv2d(x, w1.permute(3, 2, 0, 1), b1, padding=1), 3, 2))
    x = F.relu(F.max_pool2d(F.conv2d(x, w2.permute(3, 2, 0, 1), b2, padding=1), 4, 2))
    x = x.permute(0, 2, 3, 1).flatten(1)
    x = F.relu(torch.addmm(head[0], x, head[1]))
    x = F.relu(torch.addmm(head[2], x, head[3]))
    return F.cross_entropy(torch.addmm(head[4], x, head[5]), y)


LOSSES = {"mlp": mlp_loss, "cnn": cnn_loss}


def _split(vector, shapes):
    parts = vector.split([torch.Size(shape).numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
