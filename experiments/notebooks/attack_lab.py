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
# # Attack lab
#
# A defence is as good as the attacks it has met. In this notebook you are the attacker: you write an attack,
# watch which of your messages each defence accepts, and look for the strength at which it breaks.
#
# It takes a few minutes on a CPU.

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
# ## An attack is one function
#
# It gets a random key and a view of everything that happens in the round, and returns one message per Byzantine node.
# `view.own` has one model per node, the benign ones first.
#
# The attackers here agree on one vector: the mean of all benign models, moved against the step that the benign nodes
# are about to take on average. `strength` is how many average steps they go back. At strength 0 they only send
# the mean. What they send stays near the honest models, so that a defence that looks for outliers has little to see.

# %%
from typing import Annotated

import jax.numpy as jnp

from ubar_jax import attacks
from ubar_jax.registry import Number


@attacks.register
def undo(key, view, strength: Annotated[float, Number(0)]):
    """The mean of the benign models, moved back by some of their steps. Knows all models and steps."""
    benign = slice(view.benign)
    centre = jnp.mean(view.own[benign], axis=0)
    step = jnp.mean(view.update[benign], axis=0)
    return jnp.tile(centre - strength * step, (view.byzantine, 1))


# %% [markdown]
# ## Which messages are accepted?
#
# Four rules on the same network, each under the attack at strength 10: `average` takes everything, `dkrum` the one
# neighbour with the closest company, `ubar_distance` the closest neighbours (the first stage of UBAR), and `ubar` those of
# them that are no worse on the node's own images.

# %%
from ubar_jax import sweep
from ubar_jax.experiments.drawing import accepted_edges

RULES = ["average", "dkrum", "ubar_distance", "ubar"]
SETTINGS = {"byzantine_ratio": 0.3, "nodes": NODES, "batch_size": 16, "rounds": ROUNDS, "eval_every": 4}
watched = sweep({"rule": RULES, "attack": "undo(strength=10)", **SETTINGS})
watched.table().drop(columns="seconds")

# %% [markdown]
# One row per receiver, one column per sender; the attackers are to the right of the line. Bright cells are messages
# that were accepted in most rounds.

# %%
accepted_edges(watched.runs)

# %% [markdown]
# The same over time, for one of the rules. Red lines are the messages of yours that got through. Try another rule:
# change the number.

# %%
from ubar_jax import animate

animate(watched.runs[1])

# %% [markdown]
# ## The strength at which it breaks
#
# `strength` is a real number, so one compiled program serves all strengths: these runs need no new compilation.

# %%
STRENGTHS = [0, 1, 3, 10, 30, 100]
swept = sweep({"rule": RULES, "attack": [f"undo(strength={s})" for s in STRENGTHS], **SETTINGS})
swept.heat_map("attack")

# %% [markdown]
# Call a rule broken when its worst node ends below the worst of nodes that never listen to anybody (`local`). By that
# measure:

# %%
from ubar_jax import Config, simulate

alone = simulate(Config(rule="local", attack="undo(strength=0)", **SETTINGS)).final["accuracy"].min()
print(f"the worst node that learns alone: {alone:.1%}")
worst = {(run.config.rule.split("(")[0], run.config.attack): run.summary["worst"] for run in swept.runs}
for rule in RULES:
    broken = [s for s in STRENGTHS if worst[rule, f"undo(strength={float(s)})"] < alone]
    print(
        f"{rule:14}", f"breaks at strength {broken[0]}" if broken else f"holds up to strength {STRENGTHS[-1]}"
    )

# %% [markdown]
# ## Your turn
#
# Change `undo` and run its cell again: the new version replaces the old one, and is compiled and run anew. Some
# ideas:
#
# - Tell every attacker to send something else (`key` is random, `jax.random.normal(key, ...)`).
# - Wait: `sleeper(undo(strength=10), start=30)` is honest until round 30.
# - Let the attack try its messages on the rule before it sends them: `view.deployed(messages)` is what the rule
#   would do.
# - Compare with the attacks of the literature: `sweep({"attack": ["alie", "ipm", "dissensus"], ...})`.
