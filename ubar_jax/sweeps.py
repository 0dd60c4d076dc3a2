"""A sweep on one machine: what is left to do, and doing it so that nothing is lost."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from ubar_jax import checkpoints, results
from ubar_jax.compilation import Compiled, compiled_chunk
from ubar_jax.config import Config
from ubar_jax.experiment import Experiment, prepare
from ubar_jax.groups import choose_width, grouped, in_batches
from ubar_jax.registry import ConfigError
from ubar_jax.simulate import first_batch, run


class Plan(NamedTuple):
    """What a sweep has to do."""

    finished: list[Config]
    groups: list[list[Experiment]]  # what is left, by program
    notices: list[str]


class Outcome(NamedTuple):
    """What came of it."""

    failed: list[tuple[Config, Exception]]
    diverged: list[tuple[Config, tuple[int, int]]]
    programs: list[Compiled]  # of the rounds, one a group
    seconds: dict[str, float]  # total, compilation


def make_plan(configs: Sequence[Config], folder: Path, models: bool = False) -> Plan:
    """Looks what the folder has, and checks all the rest before any work. `configs` are canonical."""
    finished, left, notices = [], [], []
    for config in configs:
        path = folder / config.digest()
        try:
            if (path / ("models.npz" if models else "summary.json")).exists():
                results.load_run(path)
                finished.append(config)
                continue
        except results.DamagedError as error:
            notices.append(f"{error}; that run is done again")
        left.append(prepare(config))
    notices += [notice for experiment in left for notice in experiment.notices]
    return Plan(finished, grouped(left), list(dict.fromkeys(notices)))


def carry_out(
    plan: Plan,
    folder: Path,
    *,
    width: int | None = None,
    models: bool = False,
    checkpoint_seconds: float = 60,
    tensorboard: bool = False,
) -> Outcome:
    """Runs what is left, batch by batch; a run that fails is recorded, and the others go on.

    `width` is how many runs of a group go side by side, by default as `choose_width` says. A batch of
    which the folder has a checkpoint comes first, at the width it began with.
    """
    started = time.perf_counter()
    if tensorboard:
        _summary_writer()
    failed, diverged, programs, compiling = [], [], {}, 0.0
    left = {e.config.digest(): e for group in plan.groups for e in group}
    begun = [digests for digests in checkpoints.found(folder) if left.keys() >= set(digests)]
    batches = begun + _fresh_batches(plan, {d for digests in begun for d in digests}, width)
    over = 0
    with tqdm(total=sum(e.config.rounds for e in left.values()), unit="round", disable=None) as bar:
        for digests in batches:
            members = {d: left[d] for d in digests}  # once each: a batch may be filled up with repeats
            batch = [left[d] for d in digests]
            config, before = batch[0].config, bar.n
            bar.set_description(f"{over}/{len(left)} runs, {config.rule} {config.attack}")
            try:
                start = checkpoints.load(folder, digests, first_batch(batch)) if digests in begun else None
                keep = checkpoints.keeper(folder, digests, checkpoint_seconds)
                with _watcher(bar, list(members), folder / "tensorboard" if tensorboard else None) as watch:
                    found = dict(zip(digests, run(batch, watch, start, keep), strict=True))
                for result in found.values():
                    results.save(folder, result, models)
                    if result.diverged:
                        diverged.append((result.config, result.diverged))
                compiling += sum(r.seconds["compilation"] for r in found.values())
                compiling -= start.seconds["compilation"] if start else 0
                programs[batch[0].program] = compiled_chunk(batch[0].program, len(batch))
            except Exception as error:
                if disk_is_full(error):
                    raise
                for experiment in members.values():
                    results.save_failure(folder, experiment.config, error)
                    failed.append((experiment.config, error))
            checkpoints.remove(folder, digests)
            over += len(members)
            bar.update(before + sum(e.config.rounds for e in members.values()) - bar.n)
    seconds = {"total": time.perf_counter() - started, "compilation": compiling}
    return Outcome(failed, diverged, list(programs.values()), seconds)


def _fresh_batches(plan: Plan, begun: set[str], width: int | None) -> list[list[str]]:
    """The digests of every batch of runs that have no checkpoint."""
    batches = []
    for group in plan.groups:
        rest = [e for e in group if e.config.digest() not in begun]
        if rest:
            fresh = in_batches(rest, width or choose_width(rest))
            batches += [[e.config.digest() for e in batch] for batch in fresh]
    return batches


@contextlib.contextmanager
def _watcher(bar: tqdm, digests: list[str], tensorboard: Path | None) -> Iterator[Callable]:
    """What is done with the latest numbers of a batch: the progress line, and scalars for TensorBoard."""
    before, writers = bar.n, []

    def watch(latest: list[dict[str, Any]]) -> None:
        now = latest[0]["round"]
        bar.update(before + len(digests) * now - bar.n)
        bar.set_postfix(worst=f"{min(numbers['worst'] for numbers in latest):.1%}")
        if tensorboard is not None and not writers:  # steps that a killed process wrote are replaced
            writers.extend(_summary_writer()(str(tensorboard / d), purge_step=now) for d in digests)
        for writer, numbers in zip(writers, latest, strict=False):
            for name in ("worst", "mean", "std", "loss", "consensus"):
                writer.add_scalar(name, float(numbers[name]), now)
            writer.flush()

    try:
        yield watch
    finally:
        for writer in writers:
            writer.close()


def _summary_writer() -> type:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError("--tensorboard needs tensorboardX: pip install 'ubar_jax[tensorboard]'") from error
    return SummaryWriter


def disk_is_full(error: BaseException | None) -> bool:
    """Whether it, or what it comes from, says that no space is left."""
    if error is None:
        return False
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (
        full or os.strerror(errno.ENOSPC) in str(error) or disk_is_full(error.__cause__ or error.__context__)
    )
