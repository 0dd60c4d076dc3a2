"""Everything that determines the compiled code of a run. Runs with equal programs share the code."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax

from ubar_jax.parts.aggregation import Rule
from ubar_jax.parts.aggregation.base import Judge, Order
from ubar_jax.parts.byzantine import Attack
from ubar_jax.parts.tasks import make_task
from ubar_jax.registry import NoTraits, Spec
from ubar_jax.types import Task


@dataclass(frozen=True)
class Learner:
    """The model and data of one node, as far as they determine the compiled code."""

    model: str
    make_model: Callable | None  # function or class: registering or defining it again compiles it again
    shape: tuple[int, ...]  # of one image
    classes: int
    examples: int  # in the training set
    share: int  # training examples per node
    held_out: int = 0  # further examples per node that it does not train on


@dataclass(frozen=True)
class Program:
    """One compiled program; the letters of sizes are defined in `types`."""

    learner: Learner
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
    # Attacks named in the attack's arguments: one that is registered again is compiled again.
    inner: tuple[Attack, ...] = ()


@functools.lru_cache(maxsize=32)
def task_of(learner: Learner) -> Task:
    """The learner's model as pure functions; checks that it runs."""
    return make_task(learner.model, learner.shape, learner.classes)


def model_size(learner: Learner) -> int:
    """d, the number of parameters."""
    params = jax.eval_shape(task_of(learner).init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))
