"""Run a sweep on many processes or machines, with Ray; any of them may die.

A task is a group of runs that share a program, or a slice of one. The driver owns the results folder, hands
out tasks, shows the progress of all, and hands out again what a dead worker left. Workers write runs and
checkpoints. Ray is an optional dependency, imported only here and only when it is used.
"""

import contextlib
import os
import shutil
import socket
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from ubar_jax.engine.devices import cores
from ubar_jax.engine.meeting import host_and_port
from ubar_jax.engine.preparation import Experiment
from ubar_jax.parts import download
from ubar_jax.progress import progress_bar
from ubar_jax.registry import ConfigError
from ubar_jax.sweeps import checkpoints
from ubar_jax.sweeps.groups import COMPILE_SECONDS, choose_width, estimate
from ubar_jax.sweeps.plan import Outcome, Plan, record_failure, too_long
from ubar_jax.sweeps.results import has_result
from ubar_jax.sweeps.worker import Job, Report, read, work

POLL = 0.5  # seconds between two looks at the workers
TRIES = 3  # a run has failed when so many workers died at it, none of which got further than one before
GRACE = 5.0  # seconds after run_timeout until a worker is killed that did not stop by itself
SHARES = 4  # tasks per worker, about, if they are long
LONG = 4 * COMPILE_SECONDS  # a slice shorter than this would mostly compile
CONNECT = 10.0  # seconds to reach an address
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # the first frame of both sides in HTTP/2, which Ray speaks
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS
STORE = 80 * 2**20  # bytes of Ray's object store: nearly nothing goes through it


class Cluster(NamedTuple):
    """Ray, connected."""

    ray: Any  # the module
    workers: int
    gpus: bool  # whether a worker has a GPU


@dataclass
class _Attempt:
    """A task in the hands of Ray."""

    runs: list[str]
    note: Path
    report: Report = field(default_factory=Report)
    since: float = 0.0  # when `report.runs` were first seen
    late: list[str] = field(default_factory=list)  # runs because of which it was stopped: run_timeout


@dataclass
class _State:
    """What the driver knows of the sweep."""

    plan: Plan
    job: Job
    desk: Path  # the folder of the notes
    failed: dict[str, Exception]
    active: dict[Any, _Attempt] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    deaths: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)  # (number, furthest round)
    programs: list[bool] = field(default_factory=list)
    compilation: float = 0.0
    earlier: int = 0  # rounds that were in checkpoints when their task began


def check_flags(workers: int | None, address: str | None, devices: int | None) -> None:
    """Refuses flags that do not go together, and a missing Ray, before any work."""
    if workers is not None and address is not None:
        raise ConfigError(
            "--workers is for this machine and --address for a cluster, all of which is used; give one"
        )
    if devices not in (None, 1):
        raise ConfigError(f"--devices={devices}: a worker uses one device; leave --devices out")
    if address is not None:
        _address(address)
    if not _jax_has_gpus():
        _check_number(workers, cores(), "cores")
    _ray(address)


def _ray(address: str | None) -> Any:
    """The module, with settings that must be made before it is imported."""
    settings = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listens on loopback only
        settings["RAY_worker_niceness"] = "0"  # Ray's default is 15, behind all other processes
    else:
        settings["RAY_NUM_REDIS_GET_RETRIES"] = "1"  # a try may take 40 s
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--workers and --address need Ray: pip install 'ubar_jax[cluster]'") from error
    return ray


def _address(address: str) -> tuple[str, int]:
    return host_and_port("--address", address, "give what `ray start --head` printed")


@contextlib.contextmanager
def connected(workers: int | None, address: str | None) -> Iterator[Cluster]:
    """Ray with so many workers on this machine, for this sweep alone, or the cluster at the address."""
    ray = _ray(address)
    given: dict[str, Any] = {"address": address}
    if workers is not None:
        given = {"address": "local", "num_cpus": workers, "object_store_memory": STORE}
        given |= {"include_dashboard": False}
    elif address is not None:
        _reach(address)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks; Ray forks and executes at once
            ray.init(log_to_driver=False, logging_level="ERROR", **given)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise ConfigError(
            f"Ray cannot be used {where} ({_reason(error)}); a cluster's machines, this one too, need `ray "
            "start`, the same versions of Python and Ray, and the same RAY_AUTH_MODE and token"
        ) from error
    try:
        yield _counted(ray, workers, address)
    finally:
        ray.shutdown()


def _reason(error: BaseException) -> str:
    """The first cause of an error, in one line; Ray's messages may contain whole tracebacks."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return " ".join(str(error).rpartition("ray.exceptions.")[2].split())[:300]


def _reach(address: str) -> None:
    """Refuses an address at which Ray does not answer: its own client would try for minutes."""
    try:
        with socket.create_connection(_address(address), CONNECT) as connection:
            if os.environ.get("RAY_USE_TLS") == "1":
                return
            connection.sendall(HELLO)
            answer = connection.recv(len(SETTINGS))
    except OSError as error:
        why = str(error.strerror or error)
    else:
        if answer[3:4] == SETTINGS[3:4]:
            return
        why = "something else answers"
    raise ConfigError(
        f"Ray does not answer at --address={address} ({why}); start it there with `ray start --head`, and on "
        "this machine with `ray start --address`"
    )


def _counted(ray: Any, workers: int | None, address: str | None) -> Cluster:
    """The cluster with its number of workers: one per GPU if JAX can use GPUs, else one per core."""
    has = ray.cluster_resources()
    gpus, cpus = int(has.get("GPU", 0)), int(has.get("CPU", 0))
    on_gpus = bool(gpus) and os.environ.get("JAX_PLATFORMS") != "cpu" and _jax_has_gpus()
    there = gpus if on_gpus else cpus
    if workers is None and not min(there, cpus):
        raise ConfigError(f"the cluster at {address} has no CPU; add a machine with `ray start --address`")
    _check_number(workers, *((gpus, "GPUs") if on_gpus else (cores(), "cores")))
    return Cluster(ray, workers or min(there, cpus), on_gpus)


def _check_number(workers: int | None, limit: int, kind: str) -> None:
    if workers is not None and workers > limit:
        raise ConfigError(
            f"--workers={workers}: this machine has {limit} {kind}; give a number from 1 to that"
        )


def _jax_has_gpus() -> bool:
    """Whether an accelerator's plugin of JAX is installed; JAX itself would take the GPU's memory."""
    return bool(entry_points(group="jax_plugins"))


def cut(plan: Plan, begun: Sequence[Sequence[str]], width: int | None, workers: int) -> list[list[str]]:
    """The runs that are left, by digest, cut into tasks; the longest come first.

    A group is cut into slices only if they are long, because each slice compiles the program anew. Runs
    that go side by side (`width`), and packs with a checkpoint, `begun`, stay together.
    """
    left = plan.left
    seconds = [sum(parts) for parts in estimate(left)]
    shortest = max(LONG, sum(seconds) / workers / SHARES)
    tasks: list[tuple[float, list[str]]] = []
    for group, cost in zip(left, seconds, strict=True):
        whole = plan.group_of(group[0].digest)
        units = _units(whole, plan.finished, begun, choose_width(whole, width))
        count = max(1, min(len(units), int(cost / shortest)))
        slices = [[d for unit in units[i::count] for d in unit] for i in range(count)]
        tasks += [(cost / count, each) for each in slices]
    return [runs for _, runs in sorted(tasks, key=lambda one: -one[0])]


def _units(
    group: Sequence[Experiment], finished: set[str], begun: Sequence[Sequence[str]], width: int
) -> list[list[str]]:
    """The runs of a group that are left, each once, in parts of at most `width` that stay together."""
    digests = [e.digest for e in group]
    units: list[list[str]] = []
    for pack in begun:
        new = set(pack) <= set(digests) and not finished >= set(pack)
        if new and set(pack).isdisjoint(d for unit in units for d in unit):
            units.append(list(dict.fromkeys(pack)))
    rest = [d for d in digests if d not in finished.union(*units)]
    return units + [rest[i : i + width] for i in range(0, len(rest), width)]


def carry_out(plan: Plan, job: Job, workers: int | None, address: str | None) -> Outcome:
    """Runs what is left on workers of this machine or of a cluster; see `plan.carry_out`."""
    started = time.perf_counter()
    for digest, error in plan.failed.items():
        record_failure(job.folder, plan, digest, error)
    rounds = sum(e.config.rounds for group in plan.left for e in group)
    if not rounds:
        _remove_checkpoints(plan, job)
        return Outcome(dict(plan.failed), [], {"total": 0.0, "compilation": 0.0})
    with connected(workers, address) as cluster, _desk(job.folder) as desk, progress_bar(rounds) as bar:
        state = _State(plan, job, desk, dict(plan.failed))
        begun, notices = checkpoints.found(job.folder, plan.configs, anywhere=True)
        for notice in notices:
            bar.write(f"notice: {notice}")
        # Only a worker knows how many runs its GPU holds side by side: it gets whole groups.
        width = job.width or (len(plan.configs) if cluster.gpus else None)
        try:
            for runs in cut(plan, begun, width, cluster.workers):
                _submit(cluster, state, runs)
            while state.active:
                _look(cluster, state, bar)
        finally:
            for ref in state.active:  # on Ctrl-C, a full disk or a bad host
                cluster.ray.cancel(ref, force=True)
        _remove_checkpoints(plan, job)
    seconds = {"total": time.perf_counter() - started, "compilation": state.compilation / cluster.workers}
    return Outcome(state.failed, state.programs, seconds)


def _has_result(plan: Plan, job: Job, digest: str) -> bool:
    """Whether a run has its result now."""
    return has_result(job.folder / digest, plan.configs[digest], job.models)


def _remove_checkpoints(plan: Plan, job: Job) -> None:
    """Removes checkpoints of finished runs, whose workers died before they could."""
    for digests in checkpoints.found(job.folder, plan.configs, anywhere=True)[0]:
        if all(d in plan.configs and _has_result(plan, job, d) for d in digests):
            checkpoints.remove(job.folder, digests)


@contextlib.contextmanager
def _desk(folder: Path) -> Iterator[Path]:
    """A folder for the tasks' notes (see `worker`); one of a killed driver is removed by the next owner."""
    desk = folder / f".part-desk-{uuid.uuid4().hex[:8]}"
    desk.mkdir()
    try:
        yield desk
    finally:
        shutil.rmtree(desk, ignore_errors=True)


def _submit(cluster: Cluster, state: _State, runs: list[str]) -> None:
    """Hands a task to Ray. Ray does not repeat it: only the driver knows which runs are left."""
    note = state.desk / uuid.uuid4().hex[:8]
    note.touch()
    env = {download.SWITCH: os.environ.get(download.SWITCH, "true")}
    env |= {name: os.environ[name] for name in ("TFDS_DATA_DIR",) if name in os.environ}
    if not cluster.gpus:  # NPROC limits XLA's threads, which Ray's OMP_NUM_THREADS does not
        env |= {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
    task = cluster.ray.remote(
        num_cpus=1,
        num_gpus=int(cluster.gpus),
        max_retries=0,
        max_calls=0,  # a process does many tasks, on a GPU, too
        runtime_env={"env_vars": env},
    )(work)
    size = len(state.plan.group_of(runs[0]))
    ref = task.remote({d: state.plan.configs[d] for d in runs}, size, note, state.job)
    state.active[ref] = _Attempt(runs, note)


def _look(cluster: Cluster, state: _State, bar: tqdm) -> None:
    """Waits a moment for tasks that are done, reads all notes, and shows them."""
    done, _ = cluster.ray.wait(list(state.active), timeout=POLL)
    for attempt in state.active.values():
        _read(attempt, bar)
    for ref in done:
        _conclude(cluster, state, ref)
    limit = state.job.run_timeout
    for ref, attempt in state.active.items():
        late = limit is not None and attempt.report.runs and time.monotonic() - attempt.since > limit + GRACE
        if late and not attempt.late:
            attempt.late = attempt.report.runs
            cluster.ray.cancel(ref, force=True)
    _show(state, bar)


def _read(attempt: _Attempt, bar: tqdm) -> None:
    """Takes a new report and prints its messages."""
    report = read(attempt.note)
    if report is None:
        return
    if report.runs != attempt.report.runs:
        attempt.since = time.monotonic()
    for words in report.said[len(attempt.report.said) :]:
        bar.write(words)
    attempt.report = report


def _conclude(cluster: Cluster, state: _State, ref: Any) -> None:
    """Takes in the result of a task, or hands out again what is left after the death of its worker."""
    errors = cluster.ray.exceptions
    attempt = state.active.pop(ref)
    attempt.note.unlink(missing_ok=True)  # from now on its worker, should it still live, may not write
    try:
        done = cluster.ray.get(ref)
    except errors.RayTaskError as error:
        raise error.cause or error from None
    except errors.RayError as error:
        _bury(cluster, state, attempt, error)
        return
    state.earlier += attempt.report.earlier
    state.programs += done.programs
    state.compilation += done.seconds["compilation"]
    _fail(state, done.failed)
    state.over |= set(attempt.runs)


def _fail(state: _State, failed: dict[str, str]) -> None:
    """Counts runs as failed; their workers have recorded it."""
    state.failed |= {digest: RuntimeError(why) for digest, why in failed.items()}
    state.over |= failed.keys()


def _bury(cluster: Cluster, state: _State, attempt: _Attempt, error: Exception) -> None:
    """After the death of a worker: counts what it did, and hands out the rest.

    Runs at which `TRIES` workers died without getting further have failed, and so have those that took too
    long.
    """
    plan, folder, report = state.plan, state.job.folder, attempt.report
    state.over |= {d for d in attempt.runs if _has_result(plan, state.job, d)}
    _fail(state, report.failed)
    guilty = [d for d in attempt.late or report.runs or attempt.runs if d not in state.over]
    number, furthest = state.deaths.get(tuple(guilty), (0, -1))
    number = 1 if report.round > furthest else number + 1
    state.deaths[tuple(guilty)] = (number, max(report.round, furthest))
    if attempt.late or number >= TRIES:
        reason = TimeoutError(too_long(state.job.run_timeout or 0)) if attempt.late else _death(error)
        for digest in guilty:
            record_failure(folder, plan, digest, reason)
            state.failed[digest] = reason
        state.over |= set(guilty)
    if rest := [d for d in attempt.runs if d not in state.over]:
        _submit(cluster, state, rest)


def _death(error: Exception) -> Exception:
    """Why a run failed whose workers died."""
    kind = type(error).__name__
    memory = "OutOfMemory" in kind
    why = "it ran out of memory" if memory else f"killed from outside, perhaps for want of memory; {kind}"
    return RuntimeError(f"its worker died {TRIES} times without getting further ({why})")


def _show(state: _State, bar: tqdm) -> None:
    """Updates the bar: rounds, runs, failures."""
    configs, reports = state.plan.configs, [attempt.report for attempt in state.active.values()]
    begun = [attempt for attempt in state.active.values() if attempt.report.runs]
    rounds = sum(configs[d].rounds for d in state.over - state.plan.finished)
    total = sum(map(len, state.plan.left))
    over = len(state.over - state.plan.finished) + sum(report.over for report in reports)
    failed = len(state.failed) + sum(len(report.failed) for report in reports)
    words = f"{over}/{total} runs, {failed} failed, {len(begun)} workers"
    bar.set_description(words, refresh=False)
    bar.initial = state.earlier + sum(report.earlier for report in reports)
    bar.update(rounds + sum(report.rounds for report in reports) - bar.n)
