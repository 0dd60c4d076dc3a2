"""Plan and run a sweep on one machine; resume after interruption."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from ubar_jax.config import Config, Resolved, resolve
from ubar_jax.engine.compilation import compiled_chunk, compiling_ahead, repaired_cache
from ubar_jax.engine.preparation import Experiment, prepare
from ubar_jax.engine.simulation import Snapshot, first_snapshot, run
from ubar_jax.files import disk_is_full
from ubar_jax.progress import compiling, progress_bar
from ubar_jax.registry import ConfigError
from ubar_jax.sweeps import checkpoints, results
from ubar_jax.sweeps.groups import choose_width, grouped, in_packs
from ubar_jax.types import Result


class Plan(NamedTuple):
    """What a sweep has to do. Runs are identified by their digests."""

    configs: dict[str, Config]  # all runs, canonical
    groups: list[list[Experiment]]  # all runs by program, including finished ones
    finished: set[str]
    failed: dict[str, Exception]  # runs that could not be prepared
    notices: list[str]

    @property
    def left(self) -> list[list[Experiment]]:
        """The groups without the finished runs."""
        groups = [[e for e in g if e.digest not in self.finished] for g in self.groups]
        return [group for group in groups if group]

    def group_of(self, digest: str) -> list[Experiment]:
        """All runs that share a program with this one."""
        return next(group for group in self.groups if any(e.digest == digest for e in group))


class Outcome(NamedTuple):
    """What a sweep did."""

    failed: dict[str, Exception]  # by digest
    programs: list[bool]  # per compiled chunk of rounds, whether the persistent cache had it
    seconds: dict[str, float]  # total, compilation


def make_plan(configs: Sequence[Config | Resolved], folder: Path, models: bool = False) -> Plan:
    """Checks all runs before any work, and finds which of them are already in the folder."""
    runs: dict[str, Config] = {}
    notices: list[str] = []
    experiments, failed, finished = {}, {}, set()
    for given in configs:
        resolved = given if isinstance(given, Resolved) else resolve(given)
        digest, config = resolved.digest, resolved.config
        runs[digest] = config
        notices += resolved.notices
        try:
            experiments[digest] = prepare(resolved)
        except ConfigError:
            raise
        except Exception as error:  # raised by a user's own part
            failed[digest] = error
        try:
            if results.is_finished(folder / digest, config, models):
                finished.add(digest)
        except results.DamagedError as error:
            notices.append(f"{error}; this run is repeated")
    notices += [notice for d, e in experiments.items() if d not in finished for notice in e.notices]
    groups = grouped(list(experiments.values()))
    return Plan(runs, groups, finished, failed, list(dict.fromkeys(notices)))


def carry_out(
    plan: Plan,
    folder: Path,
    *,
    width: int | None = None,
    size: int | None = None,
    models: bool = False,
    checkpoint_seconds: float = 60,
    tensorboard: bool = False,
    run_timeout: float | None = None,
    compile_ahead: bool = True,
    show: Callable[[int], AbstractContextManager[tqdm]] = progress_bar,
    begin: Callable[[Sequence[str], dict[str, Exception]], None] = lambda runs, failed: None,
) -> Outcome:
    """Runs what is left, pack by pack; a failed run is recorded, and the others continue.

    A pack is `width` runs of one group that run side by side (default and size: `choose_width`). Packs with a
    checkpoint in the folder come first, at the width they began with. A run that is not over after
    `run_timeout` seconds has failed; that is checked between two chunks. `compile_ahead`: while a program
    runs, the next ones are compiled. `show` makes the progress bar; `begin` gets the runs of a pack before
    they run, and what failed so far.
    """
    started = time.perf_counter()
    if tensorboard:
        _summary_writer()
    known = {e.digest: e for group in plan.groups for e in group}
    begun, notices = _begun(plan, folder, known.keys())
    packs = begun + _fresh_packs(plan, {d for digests in begun for d in digests}, width, size)
    left = [e for d, e in known.items() if d not in plan.finished]
    failed, programs, compile_seconds = dict(plan.failed), {}, 0.0
    keys = [(known[digests[0]].program, len(digests)) for digests in packs]
    rounds = sum(e.config.rounds for e in left)
    ahead = compiling_ahead(keys if compile_ahead else [])
    with show(rounds) as bar, repaired_cache(), ahead as compile_next:
        for notice in notices:
            bar.write(f"notice: {notice}")
        for digest, error in plan.failed.items():
            record_failure(folder, plan, digest, error)
        over = 0
        for number, digests in enumerate(packs):
            compile_next(number)
            members = [d for d in dict.fromkeys(digests) if d not in plan.finished]
            pack = [known[d] for d in digests]
            bar.set_description(f"{over}/{len(left)} runs, {_words(pack[0])}", refresh=False)
            before = bar.n
            begin(members, failed)
            try:
                start = _start(folder, digests, pack, bar) if digests in begun else None
                if start is None:
                    checkpoints.remove(folder, digests)  # a checkpoint of other versions may be there
                checkpointing = checkpoints.writing(folder, digests, checkpoint_seconds)
                with _watcher(bar, digests, len(members), folder if tensorboard else None) as watch:
                    in_time = _limited(watch, pack[0].config.rounds, run_timeout)
                    ran = run(pack, in_time, start, checkpointing, compiling(bar))
            except Exception as error:
                broken, finished = dict.fromkeys(members, error), False
            else:
                compile_seconds += sum(result.seconds["compilation"] for result in ran)
                compile_seconds -= start.seconds["compilation"] if start else 0
                programs[keys[number]] = compiled_chunk(*keys[number]).cached
                broken = _save(folder, dict(zip(digests, ran, strict=True)), members, models)
                finished = True
            for digest, reason in broken.items():
                record_failure(folder, plan, digest, reason)  # a full disk ends the sweep here
            if finished:
                checkpoints.remove(folder, digests)
            failed |= broken
            over += len(members)
            bar.update(before + len(members) * pack[0].config.rounds - bar.n)
    seconds = {"total": time.perf_counter() - started, "compilation": compile_seconds}
    return Outcome(failed, list(programs.values()), seconds)


def _limited(watch: Callable, rounds: int, seconds: float | None) -> Callable:
    """The callback, which raises TimeoutError if the last round is not done in so many seconds from now."""
    started = time.monotonic()

    def limited(latest: list[dict[str, Any]]) -> None:
        watch(latest)
        if seconds is not None and time.monotonic() - started > seconds and latest[0]["round"] < rounds:
            raise TimeoutError(too_long(seconds))

    return limited


def too_long(seconds: float) -> str:
    """Why a run failed that was stopped by `run_timeout`."""
    return f"the run took longer than --run_timeout={seconds:g} seconds"


def _save(folder: Path, ran: dict[str, Result], members: Sequence[str], models: bool) -> dict[str, Exception]:
    """Writes the results of a pack; returns the errors of those that could not be written."""
    broken = {}
    for digest in members:
        try:
            results.save(folder, ran[digest], models)
        except Exception as error:
            broken[digest] = error
    return broken


def record_failure(folder: Path, plan: Plan, digest: str, error: Exception) -> None:
    """Writes that a run failed; a full disk ends the sweep instead."""
    if disk_is_full(error):
        raise error
    results.save_failure(folder, digest, plan.configs[digest], error)


def _words(experiment: Experiment) -> str:
    return f"{experiment.config.rule} under {experiment.config.attack}"


def _begun(plan: Plan, folder: Path, known: Set[str]) -> tuple[list[list[str]], list[str]]:
    """(packs to continue, with every run in at most one, notices). Removes checkpoints of finished packs."""
    found, notices = checkpoints.found(folder, known)
    begun: list[list[str]] = []
    taken: set[str] = set()
    for digests in found:
        if plan.finished >= set(digests):
            checkpoints.remove(folder, digests)
        elif known >= set(digests) and not taken & set(digests):
            begun.append(digests)
            taken |= set(digests)
    return begun, notices


def _start(folder: Path, digests: list[str], pack: list[Experiment], bar: tqdm) -> Snapshot | None:
    """The snapshot of a checkpoint; if it cannot be read, prints a notice and returns None."""
    try:
        start = checkpoints.load(folder, digests, first_snapshot(pack))
    except Exception as error:  # orbax raises many kinds
        bar.write(f"notice: {checkpoints.damaged(folder / checkpoints.FOLDER, error)}")
        return None
    bar.write(f"{_words(pack[0])} continues from round {start.done}")
    bar.initial += start.done  # earlier rounds do not count for the speed
    return start


def _fresh_packs(plan: Plan, begun: set[str], width: int | None, size: int | None) -> list[list[str]]:
    """The digests of every pack of runs that have no checkpoint; for width and size see `choose_width`."""
    packs = []
    for group in plan.groups:
        rest = [e for e in group if e.digest not in plan.finished | begun]
        fresh = in_packs(rest, choose_width(group, width, size))
        packs += [[e.digest for e in pack] for pack in fresh]
    return packs


@contextlib.contextmanager
def _watcher(bar: tqdm, digests: list[str], new: int, folder: Path | None) -> Iterator[Callable]:
    """Yields a callback for the latest numbers of a pack: updates the bar and writes TensorBoard scalars.

    `digests` are the runs of the pack; `new` of them were not finished before. Scalars are written only if
    the results folder is given.
    """
    before, writers = bar.n, {}

    def watch(latest: list[dict[str, Any]]) -> None:
        now = latest[0]["round"]
        bar.update(before + new * now - bar.n)
        bar.set_postfix(worst=f"{min(numbers['worst'] for numbers in latest):.1%}", refresh=False)
        if folder is None:
            return
        for digest, numbers in dict(zip(digests, latest, strict=True)).items():
            if digest not in writers:  # replaces steps written by a killed process
                path = folder / "tensorboard" / digest
                writers[digest] = _summary_writer()(str(path), purge_step=now)
            for name in numbers.keys() - {"round", "diverged", "seconds"}:
                writers[digest].add_scalar(name, float(numbers[name]), now)
            writers[digest].flush()

    try:
        yield watch
    finally:
        for writer in writers.values():
            writer.close()


def _summary_writer() -> type:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError("--tensorboard needs tensorboardX: pip install 'ubar_jax[tensorboard]'") from error
    return SummaryWriter
