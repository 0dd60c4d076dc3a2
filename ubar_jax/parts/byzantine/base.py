"""Attacks: one function each, from (key, View) to what the Byzantine nodes send.

That is one vector a Byzantine node, [f, d], broadcast to all its neighbours; an attack that is
`tailored` gives one vector a benign receiver instead, [n_b, d], which all of that node's Byzantine
neighbours tell it (if it also trains, [f + n_b, d]: first what Byzantine nodes tell each other). Honest
rows cannot be touched. Further traits: `trains`, whether the Byzantine nodes follow the protocol otherwise
(train on their share and apply the rule to what they receive), so that `view.own[view.benign:]` are their
models; `poison`, what they do to the labels they train on; `setup`, run once on the host with the network,
which checks the arguments and returns (traced numbers for the attack, notices). Real-valued arguments are
traced: one compiled program serves every strength.

Each description ends in what the attacker knows. mu and sigma are the mean and deviation per coordinate
of the models that its benign neighbours send it, the ones it has seen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from ubar_jax.registry import ConfigError, Number, Registry, Spec


@dataclass(frozen=True)
class AttackTraits:
    """What the simulator needs to know of an attack. Functions may take arguments of the attack by name."""

    trains: bool = False  # whether Byzantine nodes train and apply the rule, so that they have models
    tailored: bool | Callable[..., int | None] = False  # whether, or from which round on, every benign
    # receiver is told something else
    poison: Callable[..., Any] | None = None  # labels [f, b], classes, t -> the labels that they train on
    setup: Callable[..., tuple[dict[str, float], list[str]]] | None = None  # network, n_b, f, rounds, rule ->
    # (further numbers for the attack, notices); run once on the host, refuses what cannot work


Attack = Spec[AttackTraits]
attacks = Registry("attack", given=2, traits=AttackTraits)


Positive = Annotated[float, Number(0, open_low=True)]


def tailored_since(attack: Attack) -> int | None:
    """The round from which on the attack tells every receiver something else; None if it never does."""
    tailored = attack.traits.tailored
    if callable(tailored):
        return tailored(**attack.of(tailored))
    return 0 if tailored else None


def check_range(attack: Attack, numbers: dict) -> None:
    """Refuses numbers of an attack that float32 does not have."""
    for name, value in numbers.items():
        if isinstance(value, float) and not Number().accepts(value):
            raise ConfigError(
                f"{attack}: {name}={value:g} is not allowed; it is a number{Number().limits(value)}"
            )
