"""What a worker of a cluster does: some runs of one group, while the driver wants them.

A worker and its driver share the results folder. For every task the driver writes a note, an empty file, and
the worker writes beside it how far it is. The worker stops when the note is gone: its driver has ended, or
has given the task to another worker. It needs no Ray.
"""

import functools
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from ubar_jax.config import Config, resolve
from ubar_jax.engine.compilation import repaired_cache, use_cache
from ubar_jax.engine.devices import use_devices
from ubar_jax.files import write_json
from ubar_jax.installed import versions
from ubar_jax.progress import silent_bar
from ubar_jax.registry import ConfigError, load_plugin
from ubar_jax.sweeps.plan import carry_out, make_plan

EVERY = 0.5  # seconds between two reports


class Job(NamedTuple):
    """What all tasks of a sweep have in common; paths are absolute."""

    folder: Path  # of the results
    home: Path  # where the command was given: relative paths in settings start here
    plugins: tuple[str, ...]
    versions: dict[str, str]  # of the driver
    width: int | None
    models: bool
    checkpoint_seconds: float
    tensorboard: bool
    run_timeout: float | None


class Report(NamedTuple):
    """How far a task is."""

    runs: list[str] = []  # noqa: RUF012  # that run now, by digest; none before the first
    round: int = 0  # of these runs, summed
    rounds: int = 0  # of all runs of the task so far
    earlier: int = 0  # of these, done before this attempt, as checkpoints say
    over: int = 0  # runs of the task that are over
    failed: dict[str, str] = {}  # noqa: RUF012  # of these, by digest, and why
    said: list[str] = []  # noqa: RUF012  # messages for the user


class Done(NamedTuple):
    """What a task did."""

    failed: dict[str, str]  # by digest, and why
    programs: list[bool]  # see `Outcome`
    seconds: dict[str, float]


def report_file(note: Path) -> Path:
    """The file of a task's reports. Not the note: a late report would bring a removed note back."""
    return note.with_suffix(".json")


def read(note: Path) -> Report | None:
    """The latest report of a task; None if there is none yet."""
    try:
        return Report(**json.loads(report_file(note).read_text()))
    except (OSError, ValueError):
        return None


def work(configs: dict[str, Config], size: int, note: Path, job: Job) -> Done:
    """Carries out some runs, by digest, of a group of this size in this process; reports beside the note."""
    _check_host(note, job)
    os.chdir(job.home)
    for name in job.plugins:
        _load_once(name)
    use_devices(1)
    use_cache()
    runs = [resolve(config) for config in configs.values()]
    if [run.digest for run in runs] != list(configs):
        raise ConfigError(
            f"a plugin or graph file is not the same on {socket.gethostname()} as where the sweep began, or "
            "was edited since; run the same command again"
        )
    with repaired_cache():
        plan = make_plan(runs, job.folder, job.models)
    reporter = _Reporter(note)
    outcome = carry_out(
        plan,
        job.folder,
        width=job.width,
        size=size,
        models=job.models,
        checkpoint_seconds=job.checkpoint_seconds,
        tensorboard=job.tensorboard,
        run_timeout=job.run_timeout,
        show=lambda rounds: silent_bar(rounds, reporter.tell, reporter.say),
        begin=reporter.begin,
    )
    return Done(_told(outcome.failed), outcome.programs, outcome.seconds)


def _told(failed: dict[str, Exception]) -> dict[str, str]:
    return {digest: str(error) for digest, error in failed.items()}


@functools.cache
def _load_once(name: str) -> None:
    """Loads a plugin, once per process: a part that is registered again is compiled again."""
    load_plugin(name)


def _check_host(note: Path, job: Job) -> None:
    """Refuses a host that does not see the results folder, or that has other versions."""
    host = socket.gethostname()
    if not note.exists() or not job.home.is_dir():
        missing = job.home if note.exists() else job.folder
        raise ConfigError(
            f"{str(missing)!r} on {host} is not the folder of that name where the sweep began; give a folder "
            "that all machines share"
        )
    here = versions()
    if wrong := [name for name, version in job.versions.items() if here[name] != version]:
        told = ", ".join(f"{name} {here[name]} instead of {job.versions[name]}" for name in wrong)
        raise ConfigError(f"{host} has {told}; install the same versions on all machines")


class _Reporter:
    """Writes reports of one task; ends it by a KeyboardInterrupt when its note is gone."""

    def __init__(self, note: Path):
        self.note, self.report, self.written, self.before = note, Report(), 0.0, 0

    def begin(self, runs: Sequence[str], failed: dict[str, Exception]) -> None:
        """The next runs of the task begin; `failed` are those that failed before."""
        now = self.report
        over, self.before = now.over + len(now.runs), now.rounds
        self._write(now._replace(runs=list(runs), round=0, over=over, failed=_told(failed)))

    def tell(self, bar: tqdm) -> None:
        """The bar has changed."""
        counted: dict[str, Any] = {"rounds": bar.n, "round": bar.n - self.before, "earlier": bar.initial}
        self._write(self.report._replace(**counted), often=True)

    def say(self, words: str) -> None:
        """A message for the user."""
        self._write(self.report._replace(said=[*self.report.said, words]))

    def _write(self, report: Report, often: bool = False) -> None:
        """Keeps the report and writes it, one that comes often at most once per `EVERY` seconds."""
        self.report = report
        if not self.note.exists():
            raise KeyboardInterrupt  # not an Exception, which would be the failure of a run
        if not often or time.monotonic() - self.written > EVERY:
            write_json(report_file(self.note), report._asdict())
            self.written = time.monotonic()
