"""A run as a frozen set of words and numbers, its canonical form and its digest."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ubar_jax.parts import data, tasks
from ubar_jax.parts.aggregation import rules
from ubar_jax.parts.byzantine import attacks
from ubar_jax.parts.optimisation import optimizers, schedules
from ubar_jax.parts.topology import topologies
from ubar_jax.registry import ConfigError, Number, shown
from ubar_jax.sources import source_of


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
        """The run's identity: a hash of its canonical form and of what `own_sources` gives."""
        config = canonical(self)[0]
        fields = dataclasses.asdict(config)
        if own := own_sources(config):
            fields["sources"] = [hashlib.sha256(text.encode()).hexdigest() for text in own]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def own_sources(config: Config) -> list[str]:
    """The texts of the user's own parts and files that a canonical config uses; empty for most."""
    texts = []
    for name, registry in REGISTRIES.items():
        text = getattr(config, name)
        if registry is tasks.models and ":" in text:
            texts.append(source_of(tasks.users_class(text)))
        elif not (registry is data.datasets and data.is_tfds(text)):
            texts += registry.sources(registry.parse(text))
    network = topologies.parse(config.topology)
    if reads := network.traits.reads:
        texts.append(read_text(dict(network.arguments)[reads]))
    return texts


def read_text(path: str) -> str:
    """The contents of a file that a setting names."""
    try:
        return Path(path).read_bytes().decode("latin-1")
    except (OSError, ValueError) as error:
        raise ConfigError(f"file {shown(path)} cannot be read ({error}); looked in {Path.cwd()}") from error


REGISTRIES = {
    "rule": rules,
    "attack": attacks,
    "topology": topologies,
    "dataset": data.datasets,
    "model": tasks.models,
    "sharding": data.shardings,
    "optimizer": optimizers,
    "schedule": schedules,
}
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
        value = values[name]
        if not allowed.accepts(value):
            raise ConfigError(
                f"{name}={shown(value)} is not allowed; {name} is {allowed}{allowed.limits(value)}"
            )
        values[name] = allowed.clean(value)

    def filled(name):
        return {name: values[name]} if values[name] is not None else {}

    values["rule"] = str(rules.parse(config.rule, filled("rho")))
    values["topology"] = str(topologies.parse(config.topology, filled("connection")))
    values["rho"] = values["connection"] = None
    values["attack"] = str(attacks.parse(config.attack))
    values["sharding"] = str(data.shardings.parse(config.sharding))
    values["optimizer"] = str(optimizers.parse(config.optimizer))
    values["schedule"] = str(schedules.parse(config.schedule))
    values["model"] = tasks.check(config.model)
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
