"""Results on disk: one folder a sweep, in it one folder a run, named by the run's digest.

A run's folder appears whole or not at all: `config.json` (canonical), `curves.npz` (see `Result`),
`summary.json` (final numbers, divergence, seconds, versions, device), and on request `models.npz`, the
leaves of the final `RoundState` by their path. A run that failed has `failed.json` alone. `sweep.json` is
about the sweep, `runs.csv` has a line per run, `.lock` names the process that owns the folder, and `.part-*`
is being written.
"""

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import io
import json
import os
import platform
import shutil
import socket
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ubar_jax.config import Config
from ubar_jax.files import atomic_write, write_json
from ubar_jax.registry import ConfigError
from ubar_jax.types import Result

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
RUNS = "[!.]*/summary.json"
TABLE = "runs.csv"


class Run(NamedTuple):
    """A finished run, read back."""

    config: Config
    curves: dict[str, np.ndarray]
    summary: dict[str, Any]
    digest: str


class DamagedError(Exception):
    """A result file that cannot be read; the message names it."""


def open_folder(folder: str | Path) -> Path:
    """The folder, made if need be, after writing to it was tried."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"results folder {str(folder)!r} cannot be written ({error.strerror}); choose another "
            "with --results"
        ) from error
    return folder


@contextlib.contextmanager
def owned(folder: str | Path, command: str) -> Iterator[Path]:
    """The folder, for this process alone: held by a lock that dies with the process."""
    folder = open_folder(folder)
    try:
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(f"{folder / '.lock'} cannot be opened ({error.strerror}); remove it") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ConfigError(
                f"results folder {str(folder)!r} is in use by {lock.read() or 'another process'}; wait for "
                "it, stop it, or choose another folder with --results"
            ) from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}: {command}")
        lock.flush()
        for part in folder.glob(".part-*"):  # of a process that was killed
            if part.is_dir():
                shutil.rmtree(part, ignore_errors=True)
            else:
                part.unlink(missing_ok=True)
        yield folder


@contextlib.contextmanager
def _appearing(final: Path) -> Iterator[Path]:
    """A folder to write into that takes the name `final` when all is written."""
    part = final.with_name(f".part-{final.name}")
    part.mkdir()
    try:
        yield part
        if final.exists():
            shutil.rmtree(final)
        os.rename(part, final)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def save(folder: Path, result: Result, models: bool = False) -> None:
    """Writes one run atomically."""
    with _appearing(folder / result.digest) as part:
        write_json(part / "config.json", dataclasses.asdict(result.config))
        curves: dict[str, Any] = {"accepted": result.accepted, **result.curves}
        np.savez_compressed(part / "curves.npz", **curves)
        if models:
            state = result.state._replace(key=jax.random.key_data(result.state.key))
            leaves, _ = jax.tree_util.tree_flatten_with_path(state)
            named: dict[str, Any] = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
            np.savez(part / "models.npz", **named)
        write_json(part / "summary.json", summarise(result))


def save_failure(folder: Path, digest: str, config: Config, error: Exception) -> None:
    """Writes that a run failed, and why, unless there is a result of it."""
    if (folder / digest / "summary.json").exists():
        return
    with _appearing(folder / digest) as part:
        failure = {"config": dataclasses.asdict(config), "error": f"{type(error).__name__}: {error}"}
        write_json(part / "failed.json", failure)


def summarise(result: Result) -> dict[str, Any]:
    """The numbers of a run that fit on a line, and where they come from."""
    curves = result.curves
    return {
        "format": FORMAT,
        **{name: float(curves[name][-1]) for name in ("worst", "mean", "std", "consensus")},
        "accuracy": result.final["accuracy"].tolist(),
        "loss": result.final["loss"].tolist(),
        "diverged": result.diverged,
        "rounds_per_epoch": result.rounds_per_epoch,
        "notices": result.notices,
        "seconds": result.seconds,
        "versions": versions(),
        "device": device(),
    }


def versions() -> dict[str, str]:
    """Of everything that a number may depend on."""
    packages = ("ubar_jax", "jax", "jaxlib", "flax", "optax", "numpy")
    return {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages}


def device() -> str:
    """The kind of the device that runs take place on."""
    return str(jax.devices()[0].device_kind)


def load(*folders: str | Path) -> "pd.DataFrame":
    """All finished runs as one tidy table: a row for every evaluation of every run.

    Columns: the run's digest and settings, round, epoch, and every number that the run kept: those per
    evaluation (the mean where there is one per node), and those per round, of the last round before it.
    """
    import pandas as pd

    tables = []
    if not (runs := load_runs(*folders)):
        raise ConfigError(f"no finished run in {', '.join(map(str, folders))}; give folders of sweeps")
    for run in runs:
        settings = {"digest": run.digest, **dataclasses.asdict(run.config)}
        columns = {"round": run.curves["round"]}
        if "rounds_per_epoch" in run.summary:
            columns["epoch"] = columns["round"] / run.summary["rounds_per_epoch"]
        per_round = False
        for name, values in run.curves.items():
            if name not in ("round", "accuracy", "accepted"):
                if per_round:  # there is none before the first round
                    values = np.concatenate([[np.nan], values])[columns["round"]]
                columns[name] = values if values.ndim == 1 else values.mean(axis=1)
            per_round |= name == "std"  # the last number per evaluation
        tables.append(pd.DataFrame(columns).assign(**settings)[[*settings, *columns]])
    return pd.concat(tables, ignore_index=True)


def table(runs: Sequence[Run]) -> "pd.DataFrame":
    """A row per run: digest, settings, final worst and mean accuracy, seconds, and when it diverged."""
    import pandas as pd

    rows = []
    for run in runs:
        said = run.summary["diverged"]
        rows.append({"digest": run.digest, **dataclasses.asdict(run.config)})
        rows[-1] |= {name: run.summary[name] for name in ("worst", "mean")}
        rows[-1] |= {"seconds": sum(run.summary["seconds"].values())}
        rows[-1] |= {"diverged": "at round {}, node {}".format(*said) if said else ""}
    return pd.DataFrame(rows)


def write_table(folder: Path) -> Path:
    """Writes the table of all whole runs of a folder to its runs.csv."""
    path = folder / TABLE
    text = table(load_runs(folder)).to_csv(index=False, float_format="%.6g", lineterminator="\n")
    atomic_write(path, lambda f: f.write(text.encode()))
    return path


def varying(runs: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Those settings of `names` in which the configs of the runs differ."""
    return [name for name in names if len({getattr(run.config, name) for run in runs}) > 1]


def load_runs(*folders: str | Path) -> list[Run]:
    """Every whole run of some results folders, each digest once; damaged ones are told and left out."""
    runs: dict[str, Run] = {}
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"there is no folder {str(folder)!r}; give folders of sweeps")
    for path in (path for folder in folders for path in sorted(Path(folder).glob(RUNS))):
        try:
            runs.setdefault(path.parent.name, load_run(path.parent))
        except DamagedError as error:
            warnings.warn(f"{error}; left out (the sweep's command runs it again)", stacklevel=2)
    return list(runs.values())


def load_run(folder: Path) -> Run:
    """One run, if this version can read it. Raises DamagedError for files that cannot be read."""
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text())
        _check_format(folder, summary["format"])
        path = folder / "config.json"
        config = Config(**json.loads(path.read_text()))
        path = folder / "curves.npz"
        with np.load(io.BytesIO(path.read_bytes())) as arrays:
            curves = dict(arrays)
    except ConfigError:
        raise
    except Exception as error:  # a damaged zip alone raises half a dozen kinds
        raise DamagedError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return Run(config, curves, summary, folder.name)


def is_finished(path: Path, config: Config, models: bool = False) -> bool:
    """Whether a run's folder is there, whole. Raises DamagedError for one that is there but not whole."""
    if not path.exists() or (path / "failed.json").exists():
        return False
    if load_run(path).config != config:
        raise DamagedError(f"{path / 'config.json'} is damaged (it is not the config of this digest)")
    if not models or not (path := path / "models.npz").exists():
        return not models
    try:
        with zipfile.ZipFile(path) as file:
            bad = file.testzip()
    except Exception as error:
        raise DamagedError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if bad:
        raise DamagedError(f"{path} is damaged ({bad})")
    return True


def check_format(folder: Path) -> None:
    """Refuses a folder with results of another format."""
    for path in folder.glob(RUNS):
        try:
            found = json.loads(path.read_text())["format"]
        except (ValueError, TypeError, KeyError):
            continue  # damaged: told where it is needed
        _check_format(path.parent, found)


def _check_format(folder: Path, found: int) -> None:
    if found != FORMAT:
        raise ConfigError(
            f"{folder} has results of format {found}, this version reads {FORMAT}; choose another folder "
            "with --results"
        )
