"""What else takes time: attacks, whole sweeps, compilation."""

import functools
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ubar_jax import topology
from ubar_jax.attacks import attacks
from ubar_jax.config import Config, canonical
from ubar_jax.experiments.bench import scenes
from ubar_jax.experiments.bench.measure import ready, seconds
from ubar_jax.experiments.bench.scenes import BATCH, CONNECTION, MODELS, NODES, ROUND, TRAINING
from ubar_jax.rules import rules
from ubar_jax.sweeps import carry_out, make_plan
from ubar_jax.types import View

SWEEP = {"rule": ("average", "ubar", "dmedian"), "attack": ("none", "gaussian"), "seed": (0, 1)}  # on digits


def attack_costs(repeats: int) -> dict[str, Any]:
    """Every attack at its defaults, 30 benign and 30 Byzantine nodes, next to a training step of 30 nodes."""
    scene = scenes.make_scene("mlp", NODES, BATCH, byzantine=NODES)
    mix, count = scenes.aggregator(scene, "ubar", NODES)
    key = jax.random.key(0)
    rows = {}
    print(f"\nattacks: CPU seconds a round, {NODES} + {NODES} nodes, d = {scene.own.shape[1]:,}, one core")
    for batch in (BATCH, 64):
        benign = scene._replace(
            own=scene.own[:NODES], batch=tuple(leaf[:NODES, :batch] for leaf in scene.batch)
        )
        (rows[f"training, batch {batch}"],) = seconds([ready(*scenes.training(benign))], repeats)
    network = topology.erdos_renyi(0, (NODES, NODES), CONNECTION)
    benign_slots = topology.benign_slots(topology.to_arrays(network), NODES)
    for name in attacks.parts:
        attack = attacks.parse(name)
        setup = attack.part.traits["setup"]
        numbers = (
            setup(network, NODES, NODES, 1000, rules.parse("ubar"), **attack.of(setup))[0] if setup else {}
        )

        def send(key, arrays, count, numbers, attack=attack):
            own, graph, *_ = arrays
            now = jnp.asarray(1000, jnp.int32)
            deployed = functools.partial(mix, arrays, count)
            view = View(own, -own, graph, NODES, NODES, benign_slots, now, deployed)
            return attack(key, view, **numbers)

        (rows[name],) = seconds([ready(send, (key, scene[:4], count, numbers))], repeats)
    for name, taken in rows.items():
        print(f"{name:22}{taken:10.4f}")
    return {"deployed": "ubar", "seconds": rows}


def sweep_speed() -> dict[str, Any]:
    """Rounds per second of a whole small sweep: with its compilations, then again with all compiled."""
    configs = [
        canonical(Config(byzantine_ratio=0.3, **dict(zip(SWEEP, point, strict=True))))[0]
        for point in itertools.product(*SWEEP.values())
    ]
    rounds = sum(config.rounds for config in configs)
    print(f"\nsweep: {len(configs)} runs on digits, {rounds:,} rounds, one core")
    found = {"grid": SWEEP, "runs": len(configs), "rounds": rounds, "seconds": {}, "rounds_per_second": {}}
    for part in ("with compilation", "compiled"):
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            carry_out(make_plan(configs, Path(folder)), Path(folder))
        taken = found["seconds"][part] = time.process_time() - start
        found["rounds_per_second"][part] = rounds / taken
        print(f"{part:18}{taken:8.1f} CPU seconds{rounds / taken:10.1f} rounds a second", flush=True)
    return found


def compile_times() -> dict[str, dict[str, float]]:
    """Seconds to trace, lower and compile a training step, and a whole round with every rule."""
    rows = (TRAINING, *(ROUND + name for name in rules.parts))
    print("\ncompilation: CPU seconds" + "".join(f"{model:>8}" for model in MODELS))
    found = {model: {} for model in MODELS}
    all_scenes = {model: scenes.make_scene(model, NODES, BATCH) for model in MODELS}
    for row in rows:
        for model, scene in all_scenes.items():
            function, arguments = scenes.ours(scene, row)
            start = time.process_time()
            jax.jit(function).lower(*arguments).compile()
            found[model][row] = time.process_time() - start
        print(f"{row:24}" + "".join(f"{found[model][row]:8.2f}" for model in MODELS), flush=True)
    return found
