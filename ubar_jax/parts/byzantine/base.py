"""Attacks: one function per attack, from (key, View) to the messages of the Byzantine nodes.

The result is [f, d]: one vector per Byzantine node, broadcast to all its neighbours. A `tailored` attack
returns [n_b, d] instead: one vector per benign receiver, sent by all Byzantine neighbours of that receiver.
If it also trains, it returns [f + n_b, d]: first the vectors that Byzantine nodes send to each other. Attacks
cannot change honest messages. Further traits: `trains`, whether the Byzantine nodes otherwise follow the
protocol (train on their share and apply the rule to what they receive), so that `view.own[view.benign:]` are
their models; `poison`, how they change the labels they train on; `setup`, which runs once on the host with
the network, checks the arguments and returns (traced numbers for the attack, notices). Real-valued arguments
are traced, so one compiled program serves all their values. An attack with memory is registered with `init`,
from a `Start` to its first memory, a pytree whose leaves have the attackers in front. It then is a function
from (key, view, memory) to (messages, memory).

Each description ends with what the attacker knows. mu and sigma are the mean and standard deviation per
coordinate of the models that the attacker has seen, those of its benign neighbours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp
from jax import Array

from ubar_jax.registry import ConfigError, Number, Registry, Spec
from ubar_jax.types import Start, View


@dataclass(frozen=True)
class AttackTraits:
    """What the simulator must know about an attack. Functions may take arguments of the attack by name."""

    trains: bool = False  # whether Byzantine nodes train and apply the rule, so that they have models
    tailored: bool | Callable[..., int | None] = False  # whether, or from which round on, each benign
    # receiver gets its own message
    poison: Callable[..., Any] | None = None  # labels [f, b], classes, t -> training labels
    setup: Callable[..., tuple[dict[str, float], list[str]]] | None = None  # network, n_b, f, rounds, rule ->
    # (further numbers for the attack, notices); runs once on the host, raises ConfigError if invalid
    init: Callable[..., Any] | None = None  # Start -> its first memory; None: it remembers nothing


Attack = Spec[AttackTraits]
attacks = Registry(
    "attack",
    given=2,
    traits=AttackTraits,
    contract="An attack is a function from (key, view) to one message per Byzantine node [f, d], or per "
    "benign receiver [n_b, d] if it is tailored; one with init= is a function from (key, view, memory) to "
    "(messages, memory).",
)


Positive = Annotated[float, Number(0, open_low=True)]


def first_memory(attack: Attack, start: Start) -> Any:
    """What the attack remembers before round 0; () if it has no memory."""
    init = attack.traits.init
    return () if init is None else init(start, **attack.of(init))


def messages_of(
    attack: Attack, key: Array, view: View, memory: Any = (), **numbers: Any
) -> tuple[Array, Any]:
    """(the attack's messages, what it remembers); `numbers` are its real-valued arguments."""
    if attack.traits.init is None:
        sent = attack(key, view, **numbers)
    else:
        out = attack(key, view, memory, **numbers)
        if not isinstance(out, tuple) or len(out) != 2:
            raise attack.part.wrong("did not return (messages, memory)")
        sent, memory = out
    tailored = [view.benign, view.byzantine + view.benign]
    rows = [view.byzantine] if tailored_since(attack) is None else tailored
    if jnp.shape(sent) not in [(n, view.own.shape[1]) for n in rows]:
        got = list(jnp.shape(sent)) if hasattr(sent, "shape") else f"a {type(sent).__name__}"
        raise attack.part.wrong(
            f"returned {got}, not {' or '.join(str([n, view.own.shape[1]]) for n in rows)}"
        )
    return sent, memory


def tailored_since(attack: Attack) -> int | None:
    """The round from which on each receiver gets its own message; None if never."""
    tailored = attack.traits.tailored
    if callable(tailored):
        return tailored(**attack.of(tailored))
    return 0 if tailored else None


def check_range(attack: Attack, numbers: dict) -> None:
    """Raise ConfigError if a number of the attack does not fit float32."""
    for name, value in numbers.items():
        if isinstance(value, float) and not Number().accepts(value):
            raise ConfigError(
                f"{attack}: {name}={value:g} is not allowed; it is a number{Number().limits(value)}"
            )
