"""Everything that determines the compiled code of a run. Runs with equal programs share the code."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax

from ubar_jax.parts.aggregation import Rule
from ubar_jax.parts.aggregation.base import Judge, Order
from ubar_jax.parts.byzantine import Attack
from ubar_jax.parts.tasks import make_task
from ubar_jax.registry import NoTraits, Spec
from ubar_jax.types import Task


@dataclass(frozen=True)
class Learner:
    """The model of one node, as far as it determines the compiled code."""

    model: str
    make_model: Callable | None  # function or class: registering or defining it again compiles it again
    shape: tuple[int, ...]  # of one image
    classes: int


class Drawing(NamedTuple):
    """Everything that determines the code that draws the examples of a chunk of rounds."""

    trained: int  # r
    share: int
    held_out: int
    rounds: int
    batch: int  # b
    local_steps: int  # L
    judge: Judge
    devices: int


@dataclass(frozen=True)
class Program:
    """One compiled program; the letters of sizes are defined in `types`."""

    learner: Learner
    examples: int  # in the training set
    share: int  # training examples per node
    rule: Rule  # without the arguments of its count, which is a knob
    attack: Attack  # without its real-valued arguments, which are knobs
    strengths: tuple[str, ...]  # the names of those arguments
    optimizer: Spec[NoTraits]
    schedule: Spec[NoTraits]
    benign: int  # n_b
    byzantine: int  # f
    benign_slots: int  # H
    trained: int  # r
    slots: int  # K
    pairs: int  # P
    batch: int  # b
    chunk: int  # rounds per dispatch
    ragged: bool  # whether the last chunk is shorter
    order: Order = "while"
    judge: Judge = "batch"
    local_steps: int = 1  # L
    held_out: int = 0  # further examples per node that it does not train on
    devices: int = 1  # over which it is spread
    # Attacks named in the attack's arguments: one that is registered again is compiled again.
    inner: tuple[Attack, ...] = ()

    @property
    def drawing(self) -> Drawing:
        """How its batches are drawn; rules and attacks do not matter."""
        return Drawing(
            trained=self.trained,
            share=self.share,
            held_out=self.held_out,
            rounds=self.chunk,
            batch=self.batch,
            local_steps=self.local_steps,
            judge=self.judge,
            devices=self.devices,
        )


@functools.lru_cache(maxsize=32)
def task_of(learner: Learner) -> Task:
    """The learner's model as pure functions; checks that it runs."""
    return make_task(learner.model, learner.shape, learner.classes)


def model_size(learner: Learner) -> int:
    """d, the number of parameters."""
    params = jax.eval_shape(task_of(learner).init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))
