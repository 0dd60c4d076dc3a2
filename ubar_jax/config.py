"""A run as a frozen set of words and numbers, its canonical form and its digest."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from ubar_jax import data, models
from ubar_jax.attacks import attacks
from ubar_jax.registry import ConfigError, Number
from ubar_jax.rules import rules
from ubar_jax.schedules import optimizers, schedules
from ubar_jax.topology import topologies


@dataclass(frozen=True)
class Config:
    """One run. Parts are spec strings such as "ubar(rho=0.4)"; `nodes` counts benign ones.

    `rho` and `connection` fill the arguments of those names in the rule and the topology where the
    spec leaves them open. `alpha` None is the rule's own default.
    """

    rule: str = "ubar"
    attack: str = "none"
    topology: str = "erdos_renyi"
    dataset: str = "digits"
    model: str = "mlp"
    sharding: str = "iid"
    optimizer: str = "sgd"
    schedule: str = "fading"
    nodes: int = 10
    byzantine_ratio: float = 0.0
    connection: float | None = 0.4
    rho: float | str | None = 0.4
    alpha: float | None = None
    learning_rate: float = 0.05
    batch_size: int = 32
    rounds: int = 100
    eval_every: int = 10
    eval_size: int | None = None
    seed: int = 0

    @property
    def byzantine(self) -> int:
        """f, so that f / (nodes + f) is the Byzantine ratio."""
        ratio = self.byzantine_ratio
        return round(self.nodes * ratio / (1 - ratio))

    def digest(self) -> str:
        """The run's identity: a hash of its canonical form."""
        fields = dataclasses.asdict(canonical(self)[0])
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


RANGES = {
    "nodes": Number(2, integer=True),
    "byzantine_ratio": Number(0, 1, open_high=True),
    "connection": Number(0, 1, open_low=True, words=(None,)),
    "rho": dataclasses.replace(Number(0, 1, open_low=True), words=("conservative", "oracle", None)),
    "alpha": Number(0, 1, words=(None,)),
    "learning_rate": Number(0),
    "batch_size": Number(1, integer=True),
    "rounds": Number(1, integer=True),
    "eval_every": Number(1, integer=True),
    "eval_size": Number(1, integer=True, words=(None,)),
    "seed": Number(0, 2**31 - 1, integer=True),
}


def canonical(config: Config) -> tuple[Config, list[str]]:
    """The one form of all configs that mean the same run, and notices of what was changed.

    Every part is written with all its arguments. An attack without Byzantine nodes is `none`, and
    `none` has no Byzantine nodes. Raises ConfigError for what cannot work whatever the data.
    """
    notices = []
    values = dataclasses.asdict(config)
    for name, allowed in RANGES.items():
        if not allowed.accepts(values[name]):
            raise ConfigError(f"{name}={values[name]!r} is not allowed; {name} is {allowed}")
        values[name] = allowed.clean(values[name])

    def filled(name):
        return {name: values[name]} if values[name] is not None else {}

    values["rule"] = str(rules.parse(config.rule, filled("rho")))
    values["topology"] = str(topologies.parse(config.topology, filled("connection")))
    values["rho"] = values["connection"] = None
    values["attack"] = str(attacks.parse(config.attack))
    values["sharding"] = str(data.shardings.parse(config.sharding))
    values["optimizer"] = str(optimizers.parse(config.optimizer))
    values["schedule"] = str(schedules.parse(config.schedule))
    values["model"] = models.check(config.model)
    values["dataset"] = data.check(config.dataset)
    if values["attack"] == "none":
        values["byzantine_ratio"] = 0.0
    elif config.byzantine == 0:
        notices.append(
            f"{config.attack} with Byzantine ratio {config.byzantine_ratio:g} of {config.nodes} "
            "benign nodes has no attacker: run as attack 'none'"
        )
        values["attack"], values["byzantine_ratio"] = "none", 0.0
    return Config(**values), notices
