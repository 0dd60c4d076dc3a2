"""A sweep on one machine: what is left to do, and doing it so that nothing is lost."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from ubar_jax.config import Config, canonical
from ubar_jax.engine.preparation import Experiment, prepare
from ubar_jax.engine.program import Compiled, compiled_chunk, repaired_cache
from ubar_jax.engine.simulation import Batch, first_batch, run
from ubar_jax.files import disk_is_full
from ubar_jax.registry import ConfigError
from ubar_jax.sweeps import checkpoints, results
from ubar_jax.sweeps.groups import choose_width, grouped, in_batches
from ubar_jax.sweeps.progress import progress_bar


class Plan(NamedTuple):
    """What a sweep has to do. Runs are named by their digests."""

    configs: dict[str, Config]  # all runs, canonical
    groups: list[list[Experiment]]  # all runs by program, finished ones too
    finished: set[str]
    failed: dict[str, Exception]  # runs that cannot even be prepared
    notices: list[str]

    @property
    def left(self) -> list[list[Experiment]]:
        """The groups without what is finished."""
        groups = [[e for e in g if e.digest not in self.finished] for g in self.groups]
        return [group for group in groups if group]


class Outcome(NamedTuple):
    """What came of it."""

    failed: dict[str, Exception]  # by digest
    programs: list[Compiled]  # of the rounds
    seconds: dict[str, float]  # total, compilation


def make_plan(configs: Sequence[Config], folder: Path, models: bool = False) -> Plan:
    """Looks what the folder has, and checks all the rest before any work."""
    runs, finished, experiments, failed, notices = {}, set(), {}, {}, []
    results.check_format(folder)
    for given in configs:
        config, said = canonical(given)
        notices += said
        try:
            experiment = prepare(config)
            digest = experiment.digest
            experiments[digest] = experiment
        except ConfigError:
            raise
        except Exception as error:  # of a user's own part
            digest = config.digest()
            failed[digest] = error
        runs[digest] = config
        try:
            if results.is_finished(folder / digest, config, models):
                finished.add(digest)
        except results.DamagedError as error:
            notices.append(f"{error}; that run is done again")
    notices += [notice for d, e in experiments.items() if d not in finished for notice in e.notices]
    groups = grouped(list(experiments.values()))
    return Plan(runs, groups, finished, failed, list(dict.fromkeys(notices)))


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
    failed, programs, compiling, over = {}, {}, 0.0, 0
    known = {e.digest: e for group in plan.groups for e in group}
    left = [e for d, e in known.items() if d not in plan.finished]
    begun, notices = _begun(plan, folder, known.keys())
    batches = begun + _fresh_batches(plan, {d for digests in begun for d in digests}, width)
    with progress_bar(sum(e.config.rounds for e in left)) as bar, repaired_cache():

        def fail(digest, error):
            if disk_is_full(error):
                raise error
            results.save_failure(folder, digest, plan.configs[digest], error)
            failed[digest] = error

        for notice in notices:
            bar.write(f"notice: {notice}")
        for digest, error in plan.failed.items():
            fail(digest, error)
        for digests in batches:
            members = {d: known[d] for d in digests if d not in plan.finished}
            batch = [known[d] for d in digests]
            config, before = batch[0].config, bar.n
            bar.set_description(f"{over}/{len(left)} runs, {config.rule} {config.attack}", refresh=False)
            try:
                start = _start(folder, digests, batch, bar) if digests in begun else None
                if start is None:
                    checkpoints.remove(folder, digests)  # one of other versions would be in the way
                keep = checkpoints.keeper(folder, digests, checkpoint_seconds)
                scalars = folder / "tensorboard" if tensorboard else None
                with _watcher(bar, digests, len(members), scalars) as watch:
                    ran = run(batch, watch, start, keep, say=lambda _: bar.set_postfix_str("compiling"))
                    found = dict(zip(digests, ran, strict=True))
            except Exception as error:
                for digest in members:
                    fail(digest, error)
            else:
                compiling += sum(result.seconds["compilation"] for result in found.values())
                compiling -= start.seconds["compilation"] if start else 0
                key = (batch[0].program, len(batch))
                programs[key] = compiled_chunk(*key)
                for digest in members:
                    try:
                        results.save(folder, found[digest], models)
                    except Exception as error:
                        fail(digest, error)
                checkpoints.remove(folder, digests)
            over += len(members)
            bar.update(before + sum(e.config.rounds for e in members.values()) - bar.n)
    seconds = {"total": time.perf_counter() - started, "compilation": compiling}
    return Outcome(failed, list(programs.values()), seconds)


def _begun(plan: Plan, folder: Path, known: Set[str]) -> tuple[list[list[str]], list[str]]:
    """The batches to go on with, each run in one at most, and notices. Forgets those that are finished."""
    found, notices = checkpoints.found(folder)
    begun, taken = [], set()
    for digests in found:
        if plan.finished >= set(digests):
            checkpoints.remove(folder, digests)
        elif known >= set(digests) and not taken & set(digests):
            begun.append(digests)
            taken |= set(digests)
    return begun, notices


def _start(folder: Path, digests: list[str], batch: list[Experiment], bar: tqdm) -> Batch | None:
    """The batch of a checkpoint; None, and a notice, if it cannot be read."""
    try:
        start = checkpoints.load(folder, digests, first_batch(batch))
    except Exception as error:  # orbax raises many kinds
        bar.write(f"notice: {checkpoints.damaged(folder / checkpoints.FOLDER, error)}")
        return None
    config = batch[0].config
    bar.write(f"{config.rule} under {config.attack} goes on from round {start.done}")
    bar.initial += start.done  # what was done before says nothing of the speed
    return start


def _fresh_batches(plan: Plan, begun: set[str], width: int | None) -> list[list[str]]:
    """The digests of every batch of runs that have no checkpoint."""
    batches = []
    for group in plan.groups:
        rest = [e for e in group if e.digest not in plan.finished | begun]
        fresh = in_batches(rest, choose_width(group, width))
        batches += [[e.digest for e in batch] for batch in fresh]
    return batches


@contextlib.contextmanager
def _watcher(bar: tqdm, digests: list[str], new: int, scalars: Path | None) -> Iterator[Callable]:
    """What is done with the latest numbers of a batch: the progress line, and scalars for TensorBoard.

    `digests` names every run of the batch, `new` of them were not finished before.
    """
    before, writers = bar.n, {}

    def watch(latest: list[dict[str, Any]]) -> None:
        now = latest[0]["round"]
        bar.update(before + new * now - bar.n)
        bar.set_postfix(worst=f"{min(numbers['worst'] for numbers in latest):.1%}", refresh=False)
        for digest, numbers in dict(zip(digests, latest, strict=True)).items() if scalars else ():
            if digest not in writers:  # steps that a killed process wrote are replaced
                writers[digest] = _summary_writer()(str(scalars / digest), purge_step=now)
            for name in ("worst", "mean", "std", "loss", "consensus"):
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
