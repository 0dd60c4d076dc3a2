"""A serial simulator to compare ubar_jax with: plain torch, one node after the other, without attackers.

Nodes are torch modules. `play` is one round of the whole network: every node trains on its batch, sends its
parameters as a vector, and mixes in the result of its rule on the neighbours' vectors.

A rule is `rule(own [d], messages [k, d], count, own_loss, loss) -> [d]`: `count` is the node's n_hat, or the
number of neighbours that UBAR keeps; `loss` maps one model to its loss on the node's own batch. Nothing is
shared between nodes. Bad messages are not checked for, unlike in ubar_jax.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


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
    """[k] sum of each row's k - n_hat - 2 (at least one) smallest squared distances to the others."""
    k = len(squares)
    terms = min(k, max(1, k - n_hat - 2) + 1)  # one more: a message's zero distance to itself
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
    medians = distances.sort(dim=1).values[:, 1 + (len(messages) - 2) // 2]  # skip the zero to itself
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
    """n_hat, at most the largest value for which the rule is defined."""
    return max(0, min(int(count), limit))


def middle(ordered):
    """The median of sorted values; the mean of the middle two if their number is even."""
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


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def lenet():
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(3, 2), nn.ReLU()),
        *(nn.Conv2d(16, 64, 4, padding=1), nn.MaxPool2d(4, 2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(2304, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10)),
    )


MODELS = {"mlp": mlp, "lenet": lenet, "cnn": cnn}  # images [b, C, H, W]: 28x28x1, 28x28x1, 32x32x3


def train(models, batches):
    """The loss of every model on its batch (x, y); gradients are stored in the parameters."""
    losses = []
    for model, (x, y) in zip(models, batches, strict=True):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.detach())
    return losses


@torch.no_grad()
def aggregate(rule, vectors, neighbours, counts, own_losses, batches, probe):
    """One aggregation of the whole network, node by node: a list of the rule's result [d] per node.

    vectors: a model [d] per node; neighbours: a list of ids per node; batches: (x, y) per node; probe: a
    module into which models are loaded for evaluation.
    """
    mixed = []
    for i, ids in enumerate(neighbours):
        x, y = batches[i]

        def loss(vector, x=x, y=y):
            vector_to_parameters(vector, probe.parameters())
            return F.cross_entropy(probe(x), y)

        messages = torch.stack([vectors[j] for j in ids])
        mixed.append(rule(vectors[i], messages, counts[i], own_losses[i], loss))
    return mixed


def play(rule, models, images, labels, index, neighbours, counts, alphas, rate, probe):
    """One round: new parameters alpha x_i + (1 - alpha) R - rate * gradient.

    Returns the losses and the new vectors, which are also the models' parameters.
    images [N, C, H, W], labels [N]; index: the example indices [b] of each node's batch.
    """
    batches = [(images[examples], labels[examples]) for examples in index]
    losses = train(models, batches)
    vectors = [parameters_to_vector(model.parameters()).detach() for model in models]
    mixed = aggregate(rule, vectors, neighbours, counts, losses, batches, probe)
    new = []
    for model, own, other, alpha in zip(models, vectors, mixed, alphas, strict=True):
        gradient = parameters_to_vector(p.grad for p in model.parameters())
        new.append(alpha * own + (1 - alpha) * other - rate * gradient)
        vector_to_parameters(new[-1], model.parameters())
    return losses, new


def modules(model, vectors):
    """One module per vector [d], with the vector's numbers."""
    made = [MODELS[model]() for _ in vectors]
    for module, vector in zip(made, vectors, strict=True):
        vector_to_parameters(vector, module.parameters())
    return made


def in_batches(x, y):
    """Images x [n, b, H, W, C] and labels y [n, b] as a list of ([b, C, H, W], [b]) per node."""
    return list(zip(channels_first(x), y, strict=True))


def channels_first(x):
    """[..., H, W, C] -> [..., C, H, W], also in memory; `contiguous` would keep images of one channel."""
    return x.movedim(-1, -3).clone(memory_format=torch.contiguous_format)


def training(model, vectors, x, y):
    """A function that takes one training step of all nodes; vectors [n, d], images x [n, b, H, W, C]."""
    models, batches = modules(model, vectors), in_batches(x, y)
    return lambda: train(models, batches)


def aggregation(rule, model, vectors, x, y, neighbours, counts, own_losses):
    """A function that aggregates once: a list of [d] per node."""
    batches, probe, rows = in_batches(x, y), MODELS[model](), list(vectors)
    return lambda: aggregate(RULES[rule], rows, neighbours, counts, own_losses, batches, probe)


def rounds(rule, model, vectors, images, labels, index, neighbours, counts, alphas, rate):
    """A function that plays one round: losses and new models, lists of n; images are [N, H, W, C]."""
    images, probe = channels_first(images), MODELS[model]()
    network = (modules(model, vectors), images, labels, index, neighbours)
    return lambda: play(RULES[rule], *network, counts, alphas, rate, probe)
