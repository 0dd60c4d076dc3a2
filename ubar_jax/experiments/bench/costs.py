"""The cost of attacks, whole sweeps and compilation."""

import functools
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ubar_jax.config import Config, canonical
from ubar_jax.engine.compilation import executable
from ubar_jax.engine.round import without_lost
from ubar_jax.experiments.bench import scenes
from ubar_jax.experiments.bench.measure import ready, seconds
from ubar_jax.experiments.bench.scenes import BATCH, CONNECTION, MODELS, NODES, ROUND, ROUNDS, TRAINING
from ubar_jax.parts import topology
from ubar_jax.parts.aggregation import rules
from ubar_jax.parts.byzantine import attacks, first_memory, messages_of
from ubar_jax.sweeps.plan import carry_out, make_plan
from ubar_jax.types import Start, View

SWEEP: dict[str, tuple[Any, ...]] = {  # on digits
    "rule": ("average", "ubar", "dmedian"),
    "attack": ("none", "gaussian"),
    "seed": (0, 1),
}


def attack_costs(repeats: int) -> dict[str, Any]:
    """Times every attack at its defaults, with 30 + 30 nodes, in turns with a training step of 30 nodes.

    As in a run, one program has several rounds or steps, and the models change in between. The cost of the
    same program with attackers that send their own models is subtracted.
    """
    scene = scenes.make_scene("mlp", NODES, BATCH, byzantine=NODES)
    mix, count = scenes.aggregator(scene, "ubar", NODES)
    print(f"\nattacks: CPU seconds per round, {NODES} + {NODES} nodes, d = {scene.own.shape[1]:,}, one core")
    print(f"{'':22}{'seconds':>10}{f'of a training step, batch {BATCH}':>35}{64:>8}")
    steps = []
    for batch in (BATCH, 64):
        batches = tuple(leaf[:NODES, :batch] for leaf in scene.batch)
        steps.append(ready(*scenes.several_steps(scene._replace(own=scene.own[:NODES], batch=batches))))
    network = topology.erdos_renyi(0, (NODES, NODES), CONNECTION)
    benign_slots = topology.benign_slots(topology.to_arrays(network), NODES)

    def rounds(attack, memory):
        def play(arrays, count, numbers):
            def one(state, key):
                own, told, memory = state
                deployed = functools.partial(mix, (own, *arrays[1:]), count)
                now = jnp.asarray(1000, jnp.int32)
                graph = without_lost(arrays[1], own[:NODES], rules.parse("ubar"))
                view = View(
                    own=own,
                    update=-own,
                    graph=graph,
                    benign=NODES,
                    byzantine=NODES,
                    benign_slots=benign_slots,
                    t=now,
                    deployed=deployed,
                )
                sent, memory = attack(key, view, memory, **numbers)
                return (0.999 * own, told + sent, memory), None

            state = (arrays[0], jnp.zeros_like(arrays[0][NODES:]), memory)
            return lax.scan(one, state, jax.random.split(jax.random.key(0), ROUNDS))[0]

        return play

    idle = ready(rounds(lambda key, view, memory: (view.own[NODES:], memory), ()), (scene[:4], count, {}))
    rows, of_a_step = {}, {}
    for name in attacks.parts:
        attack = attacks.parse(name)
        numbers: dict[str, float] = {}
        if setup := attack.traits.setup:
            numbers, _ = setup(network, NODES, NODES, 1000, rules.parse("ubar"), **attack.of(setup))
        memory = first_memory(attack, Start(scene.own, scene.graph.mask.shape[1], NODES, jax.random.key(0)))
        sent = functools.partial(messages_of, attack)
        attacked = ready(rounds(sent, memory), (scene[:4], count, numbers))
        *training, without, taken = seconds([*steps, idle, attacked], repeats)
        rows[name] = (taken - without) / ROUNDS
        of_a_step[name] = [(taken - without) / step for step in training]
        print(f"{name:22}{rows[name]:10.4f}{of_a_step[name][0]:35.2f}{of_a_step[name][1]:8.2f}", flush=True)
    return {
        "deployed": "ubar",
        "rounds": ROUNDS,
        "batches": (BATCH, 64),
        "seconds": rows,
        "of_a_training_step": of_a_step,
    }


def sweep_speed() -> dict[str, Any]:
    """Rounds per second of a whole small sweep, with its compilations, and again without."""
    configs = [
        canonical(Config(byzantine_ratio=0.3, **dict(zip(SWEEP, point, strict=True))))[0]
        for point in itertools.product(*SWEEP.values())
    ]
    rounds = sum(config.rounds for config in configs)
    print(f"\nsweep: {len(configs)} runs on digits, {rounds:,} rounds, one core")
    found: dict[str, Any] = {"grid": SWEEP, "runs": len(configs), "rounds": rounds}
    found |= {"seconds": {}, "rounds_per_second": {}}
    for part in ("with compilation", "compiled"):
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            carry_out(make_plan(configs, Path(folder)), Path(folder))
        taken = found["seconds"][part] = time.process_time() - start
        found["rounds_per_second"][part] = rounds / taken
        print(f"{part:18}{taken:8.1f} CPU seconds{rounds / taken:10.1f} rounds per second", flush=True)
    return found


def compile_times() -> dict[str, dict[str, float]]:
    """Seconds to trace, lower and compile a training step, and a whole round with every rule."""
    rows = (TRAINING, *(ROUND + name for name in rules.parts))
    print("\ncompilation: CPU seconds" + "".join(f"{model:>8}" for model in MODELS))
    found: dict[str, dict[str, float]] = {model: {} for model in MODELS}
    all_scenes = {model: scenes.make_scene(model, NODES, BATCH) for model in MODELS}
    for row in rows:
        for model, scene in all_scenes.items():
            function, arguments = scenes.ours(scene, row)
            start = time.process_time()
            executable(jax.jit(function).lower(*arguments))
            found[model][row] = time.process_time() - start
        print(f"{row:24}" + "".join(f"{found[model][row]:8.2f}" for model in MODELS), flush=True)
    return found
