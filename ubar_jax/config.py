"""Config: the settings of one run, their canonical form and digest."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ubar_jax.parts import data, tasks
from ubar_jax.parts.aggregation import rules
from ubar_jax.parts.aggregation.base import JUDGES, RuleTraits
from ubar_jax.parts.byzantine import attacks
from ubar_jax.parts.byzantine.base import AttackTraits
from ubar_jax.parts.optimisation import optimizers, schedules
from ubar_jax.parts.topology import TopologyTraits, topologies
from ubar_jax.registry import Choice, ConfigError, NoTraits, Number, Registry, Spec, shown
from ubar_jax.sources import source_of


@dataclass(frozen=True)
class Config:
    """The settings of one run. Parts are spec strings such as "ubar(rho=0.4)"; `nodes` counts benign nodes.

    `rho` and `connection` are used where the spec of the rule or the topology does not set the argument of
    that name. `alpha=None` and `order=None` mean the rule's own. A round has `local_steps` steps of SGD, each
    on `batch_size` examples, and one exchange. `order` is "while" (the paper: gradient at x_i, mixing of x_j,
    then the step) or "then" (the step first: nodes send and mix x + u). `judge` says on which examples rules
    take losses, `batch_size` of them per round: "batch" (those that the node trains on), "next" (those that
    it trains on in the next round) or "held_out" (from the share `held_out` of its examples that it never
    trains on).
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
    order: str | None = None
    local_steps: int = 1
    held_out: float = 0.0
    judge: str = "batch"

    @property
    def byzantine(self) -> int:
        """f, the number of Byzantine nodes: f / (nodes + f) is the Byzantine ratio, after rounding f."""
        ratio = self.byzantine_ratio
        return round(self.nodes * ratio / (1 - ratio))

    def digest(self) -> str:
        """The run's identity: a hash of its canonical form and of the user code and files that it uses."""
        return resolve(self).digest


@dataclass(frozen=True)
class Resolved:
    """A config with its spec strings parsed, once; the rest of the package passes this on."""

    config: Config  # canonical
    digest: str  # computed when the config was resolved: the user's files may change later
    rule: Spec[RuleTraits]
    attack: Spec[AttackTraits]
    topology: Spec[TopologyTraits]
    sharding: Spec[NoTraits]
    optimizer: Spec[NoTraits]
    schedule: Spec[NoTraits]
    notices: tuple[str, ...]  # what was changed


def read_text(path: str) -> str:
    """The contents of a file named by a setting."""
    try:
        return Path(path).read_bytes().decode("latin-1")
    except (OSError, ValueError) as error:
        raise ConfigError(f"file {shown(path)} cannot be read ({error}); looked in {Path.cwd()}") from error


REGISTRIES: dict[str, Registry[Any]] = {
    "rule": rules,
    "attack": attacks,
    "topology": topologies,
    "dataset": data.datasets,
    "model": tasks.models,
    "sharding": data.shardings,
    "optimizer": optimizers,
    "schedule": schedules,
}
SPECS = (
    "rule",
    "attack",
    "topology",
    "sharding",
    "optimizer",
    "schedule",
)  # parts that are always in a registry
LATER = ("order", "local_steps", "held_out", "judge")  # not in the digest at their defaults: old runs keep it
RANGES: dict[str, Number | Choice] = {
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
    "order": Choice(("while", "then", None)),
    "local_steps": Number(1, integer=True),
    "held_out": Number(0, 1, open_high=True),
    "judge": Choice(JUDGES),
}


def canonical(config: Config) -> tuple[Config, list[str]]:
    """(canonical form, equal for all configs that mean the same run, notices of what was changed)."""
    resolved = resolve(config)
    return resolved.config, list(resolved.notices)


def resolve(config: Config) -> Resolved:
    """Looks up all parts of a config and brings it into its canonical form.

    Every part is written with all its arguments. An attack without Byzantine nodes becomes `none`, and
    `none` has no Byzantine nodes. Raises ConfigError for settings that are invalid for any data.
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
    fill = {"rule": "rho", "topology": "connection"}  # settings used where a spec does not set the argument
    specs: dict[str, Spec] = {}
    for name in SPECS:
        given = {key: values[key] for key in [fill.get(name)] if key and values[key] is not None}
        specs[name] = REGISTRIES[name].parse(values[name], given)
    if specs["attack"].part.name == "none":
        values["byzantine_ratio"] = 0.0
    elif config.byzantine == 0:
        notices.append(
            f"{config.attack} with Byzantine ratio {config.byzantine_ratio:g} of {config.nodes} "
            "benign nodes has no attacker: run as attack 'none'"
        )
        specs["attack"], values["byzantine_ratio"] = attacks.parse("none"), 0.0
    values["order"] = _own_or(values["order"], specs["rule"])
    if not specs["rule"].traits.judged_by and values["judge"] != "batch":
        notices.append(f"{config.rule} takes no losses: judge={config.judge!r} makes no difference")
        values["judge"] = "batch"
    check_judge(specs["rule"], values["judge"], values["held_out"])
    values |= {name: str(spec) for name, spec in specs.items()}
    values |= {"rho": None, "connection": None}
    values |= {"model": tasks.check(config.model), "dataset": data.check(config.dataset)}
    found = Config(**values)
    return Resolved(config=found, digest=_digest(found, specs), notices=tuple(notices), **specs)


def _own_or(order: str | None, rule: Spec[RuleTraits]) -> str | None:
    """The order, or None if it is the rule's own; refuses one that the rule does not work with."""
    orders = rule.traits.orders
    if order is not None and order not in orders:
        raise ConfigError(
            f"rule {rule.part.name!r} does not work with order={order!r}; it works with "
            + " and ".join(map(repr, orders))
        )
    return None if order == orders[0] else order


def check_judge(rule: Spec[RuleTraits], judge: str, held_out: float) -> None:
    """Refuses a judge that the rule does not work with, or that has no examples."""
    judges = rule.traits.judged_by
    if judges and judge not in judges:
        raise ConfigError(
            f"rule {rule.part.name!r} does not work with judge={judge!r}; it works with "
            + " and ".join(map(repr, judges))
        )
    if judge == "held_out" and not held_out:
        raise ConfigError(
            "judge='held_out' needs held-out examples; set held_out, the share of every node's examples that "
            "it does not train on, such as held_out=0.2"
        )


def _digest(config: Config, specs: dict[str, Spec]) -> str:
    """A hash of a canonical config and of the source text of the user's parts and files in it, if any."""
    texts = [text for name, spec in specs.items() for text in REGISTRIES[name].sources(spec)]
    if ":" in config.model:
        texts.append(source_of(tasks.users_class(config.model)))
    else:
        texts += tasks.models.sources(tasks.models.parse(config.model))
    if not data.is_tfds(config.dataset):
        texts += data.datasets.sources(data.datasets.parse(config.dataset))
    if reads := specs["topology"].traits.reads:
        texts.append(read_text(dict(specs["topology"].arguments)[reads]))
    fields = dataclasses.asdict(config)
    fields = {k: v for k, v in fields.items() if k not in LATER or v != getattr(Config, k)}
    if texts:
        fields["sources"] = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
