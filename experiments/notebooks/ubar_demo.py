# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Learning together while some lie
#
# A few computers learn to read handwritten digits. Each has its own images, and there is no server: in every round
# each node takes a step on its own images, sends its whole model to its neighbours, and mixes what it hears into
# its own. That works well, as long as everybody is honest.
#
# Here some nodes are not. They are called *Byzantine*: they send whatever hurts most. This notebook shows
# what that does to plain averaging, how UBAR, a rule from the paper *Byzantine-resilient Decentralized Stochastic
# Gradient Descent* (Guo et al.), answers it, and how to try a rule of your own.
#
# It takes about three minutes on a CPU. Most of that is compiling: every network becomes one JAX program.

# %% tags=["install"]
import importlib.util
import subprocess
import sys
from pathlib import Path

ADDRESS = None  # of the repository; `make notebooks` copies it from pyproject.toml

if importlib.util.find_spec("ubar_jax") is None:
    wheels = sorted(map(str, Path.cwd().glob("ubar_jax-*.whl")))
    checkouts = [str(folder) for folder in Path.cwd().parents if (folder / "ubar_jax").is_dir()]
    sources = [*wheels[-1:], *checkouts[:1], *([f"git+{ADDRESS}"] if ADDRESS else [])]
    if not sources:
        raise ImportError(
            "ubar_jax is not installed. Upload its wheel (ubar_jax-...whl) next to this notebook, or open the "
            "notebook inside a checkout of the repository; then run this cell again."
        )
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", sources[0]], check=True)
print("ubar_jax is here")

# %%
import jax

GPU = jax.default_backend() == "gpu"
NODES, ROUNDS = (30, 200) if GPU else (10, 60)
print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}: {NODES} benign nodes, {ROUNDS} rounds")
if not GPU:
    print("No GPU was found, so the networks are small. On a GPU they grow.")

# %% [markdown]
# ## One network under attack
#
# A run is described by a `Config`. Three tenths of all nodes are Byzantine. They send noise (`gaussian`), and
# everybody else takes the plain average of what arrives.

# %%
from ubar_jax import Config, simulate

SETTINGS = {"byzantine_ratio": 0.3, "nodes": NODES, "batch_size": 16, "rounds": ROUNDS, "eval_every": 4}
averaging = simulate(Config(rule="average", attack="gaussian", **SETTINGS), progress=True)
averaging

# %% [markdown]
# This is the network. Squares are the attackers; dotted links touch one of them.

# %%
averaging.network()

# %% [markdown]
# And this is how well each benign node reads digits that it has never seen, over time. One in ten is what guessing
# gives.

# %%
averaging.plot()

# %% [markdown]
# ## The same network with UBAR
#
# A node that follows UBAR trusts nobody. It first keeps the neighbours whose models are closest to its own (the
# share `rho` of them), and of those it mixes in only models that are no worse than its own on its own images.

# %%
ubar = simulate(Config(rule="ubar(rho=0.4)", attack="gaussian", **SETTINGS), progress=True)
ubar.plot()

# %% [markdown]
# The number that counts is the accuracy of the **worst** benign node: a defence that gives up one node has failed
# that node.

# %%
for name, result in {"average": averaging, "UBAR": ubar}.items():
    accuracy = result.final["accuracy"]
    print(f"{name:8} worst node {accuracy.min():6.1%}   mean of all {accuracy.mean():6.1%}")

# %% [markdown]
# ## Who listened to whom, over time
#
# Press play. Circles are benign nodes; the brighter, the better they read. A grey line is a message that was
# accepted from a benign node, a red one from an attacker; the thicker, the more often.

# %%
ubar.animate()

# %%
averaging.animate()

# %% [markdown]
# ## A rule of your own
#
# A rule is one function, from what arrived (the inbox) to what is mixed in. Here is one: take the mean of the
# closer half of the neighbours. Distances between all models come from `linalg`; arrays have one row per node and one
# column per neighbour. Change it, run the cell again, and everything below uses the new version.

# %%
import jax.numpy as jnp

from ubar_jax import linalg, rules


@rules.register
def closer_half(inbox):
    """The mean of the closer half of the neighbours."""
    rank = linalg.ranks(linalg.own_distances(inbox))  # 0 for the closest neighbour
    half = (jnp.sum(inbox.graph.mask, axis=1) + 1) // 2
    near = (rank < half[:, None]) & inbox.graph.mask
    return linalg.mean(inbox, near), {"selected": near}


# %% [markdown]
# ## A small sweep
#
# Three rules against three attacks and no attack: noise, the model with its sign turned round (`bit_flip`), and
# `alie`, which stays close to the honest models. A grid is a dictionary; every
# list in it is varied.

# %%
from ubar_jax import sweep

GRID = {
    "rule": ["average", "ubar(rho=0.4)", "closer_half"],
    "attack": ["none", "gaussian", "bit_flip", "alie"],
}
swept = sweep({**GRID, **SETTINGS})
swept.heat_map("attack")

# %% [markdown]
# Every cell is the accuracy of the worst benign node at the end, in per cent. The same numbers as a table:

# %%
swept.table().drop(columns="seconds")

# %% [markdown]
# ## Where the closer half goes wrong
#
# Run it once more under noise, and look at its worst node.

# %%
mine = simulate(Config(rule="closer_half", attack="gaussian", **SETTINGS))
node = int(mine.final["accuracy"].argmin())
heard = mine.links[mine.links[:, 0] == node, 1]
print(f"worst: node {node}, {mine.final['accuracy'][node]:.1%}")
print(f"{len(heard)} neighbours, {sum(heard >= NODES)} of them attackers")

# %% [markdown]
# Next, who accepted whom: one row per receiver, one column per sender, the attackers to the right of the line. Find
# the row of that node. In the run that is stored here, four of its six neighbours are attackers. Its closer half is three
# neighbours, so at least one attacker is among them in every round, however far away he is.
#
# UBAR keeps fewer (the share `rho`), and a model that is worse than the node's own is dropped even if it is close.

# %%
mine.accepted_edges()

# %% [markdown]
# ## Going on
#
# - `sweep(..., folder="results/mine")` keeps the runs: a second call runs only what is new.
# - `"seed": [0, 1, 2]` in the grid repeats everything with other networks; the heat map then shows the spread.
# - The notebook `attack_lab` takes the other side: it builds an attack and looks for the strength at which each rule
#   breaks. UBAR, too, can be broken.
