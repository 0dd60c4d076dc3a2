"""Results on disk: one folder per sweep, with one folder per run, named by the run's digest.

A run's folder is written atomically: `config.json` (canonical), `curves.npz` (see `Result`), `summary.json`
(final numbers, divergence, seconds, versions, device), and on request `models.npz`, the leaves of the final
`RoundState` by path. A failed run has only `failed.json`. `sweep.json` describes the sweep, `runs.csv` has a
line per run, `.lock` names the process that owns the folder, and `.part-*` are being written.
"""

import contextlib
import dataclasses
import errno
import fcntl
import io
import json
import os
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
from ubar_jax.installed import versions
from ubar_jax.registry import ConfigError
from ubar_jax.types import Result

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
RUNS = "[!.]*/summary.json"
TABLE = "runs.csv"
EDGES = (
    "accepted",
    "links",
    "accepted_since",
)  # in curves.npz, but no curves; the last two are not in old runs


class Run(NamedTuple):
    """A finished run, read from disk."""

    config: Config
    curves: dict[str, np.ndarray]
    summary: dict[str, Any]
    digest: str


class DamagedError(Exception):
    """A result file cannot be read; the message names it."""


def open_folder(folder: str | Path, flag: str = "--results") -> Path:
    """Create the folder, which the user named by a flag, and check that it is writable."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"results folder {str(folder)!r} cannot be written ({error.strerror}); choose another with {flag}"
        ) from error
    return folder


@contextlib.contextmanager
def owned(folder: str | Path, command: str) -> Iterator[Path]:
    """Opens the folder for this process alone, under a lock that ends with the process."""
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
        for part in folder.glob(".part-*"):  # left by a killed process
            if part.is_dir():
                shutil.rmtree(part, ignore_errors=True)
            else:
                part.unlink(missing_ok=True)
        check_format(folder)
        yield folder


@contextlib.contextmanager
def _appearing(final: Path) -> Iterator[Path]:
    """Yields a folder to write into; renames it to `final` when everything is written.

    Two workers may write the same run after a network was cut in two. Their bits are equal: the last one
    wins, or gives up if the other comes between.
    """
    part = final.with_name(f".part-{final.name}-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)  # of a killed process with the same number
    part.mkdir()
    try:
        yield part
        shutil.rmtree(final, ignore_errors=True)
        try:
            os.rename(part, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def as_run(result: Result) -> Run:
    """A result as it would be read from disk."""
    edges = {name: getattr(result, name) for name in EDGES if getattr(result, name) is not None}
    return Run(result.config, edges | result.curves, summarise(result), result.digest)


def save(folder: Path, result: Result, models: bool = False) -> None:
    """Writes one run atomically."""
    run = as_run(result)
    with _appearing(folder / result.digest) as part:
        write_json(part / "config.json", dataclasses.asdict(result.config))
        curves: dict[str, Any] = run.curves
        np.savez_compressed(part / "curves.npz", **curves)
        if models:
            state = result.state._replace(key=jax.random.key_data(result.state.key))
            leaves, _ = jax.tree_util.tree_flatten_with_path(state)
            named: dict[str, Any] = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
            np.savez(part / "models.npz", **named)
        write_json(part / "summary.json", run.summary)


def save_failure(folder: Path, digest: str, config: Config, error: Exception) -> None:
    """Records that a run failed, and why, unless it has a result."""
    if has_result(folder / digest, config):
        return
    with _appearing(folder / digest) as part:
        failure = {"config": dataclasses.asdict(config), "error": f"{type(error).__name__}: {error}"}
        write_json(part / "failed.json", failure)


def summarise(result: Result) -> dict[str, Any]:
    """The final numbers of a run, and the versions and device that they come from."""
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


def device() -> str:
    """The kind of the device that executes the runs."""
    return str(jax.devices()[0].device_kind)


def load(*folders: str | Path) -> "pd.DataFrame":
    """All finished runs as one tidy table, with a row per run and evaluation.

    Columns: the run's digest and settings, round, epoch, and every recorded number. Numbers per node are
    averaged; numbers per round are those of the last round before the evaluation.
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
            if name not in ("round", "accuracy", *EDGES):
                if per_round:  # no value before the first round
                    values = np.concatenate([[np.nan], values])[columns["round"]]
                columns[name] = values if values.ndim == 1 else values.mean(axis=1)
            per_round |= name == "std"  # the last curve per evaluation
        tables.append(pd.DataFrame(columns).assign(**settings)[[*settings, *columns]])
    return pd.concat(tables, ignore_index=True)


def table(runs: Sequence[Run]) -> "pd.DataFrame":
    """A row per run: digest, settings, final worst and mean accuracy, seconds, when it diverged."""
    import pandas as pd

    rows = []
    for run in runs:
        said = run.summary["diverged"]
        rows.append({"digest": run.digest, **dataclasses.asdict(run.config)})
        rows[-1] |= {name: round(run.summary[name], 6) for name in ("worst", "mean")}
        rows[-1] |= {"seconds": round(sum(run.summary["seconds"].values()), 3)}
        rows[-1] |= {"diverged": "at round {}, node {}".format(*said) if said else ""}
    return pd.DataFrame(rows).astype({"eval_size": "Int64"} if rows else {})  # some may have none


def write_table(folder: Path) -> Path:
    """Writes the table of all readable runs of a folder to its runs.csv."""
    path = folder / TABLE
    text = table(load_runs(folder)).to_csv(index=False, lineterminator="\n")
    atomic_write(path, lambda f: f.write(text.encode()))
    return path


def varying(runs: Sequence[Any], names: Sequence[str]) -> list[str]:
    """The settings among `names` in which the configs of the runs differ."""
    return [name for name in names if len({getattr(run.config, name) for run in runs}) > 1]


def load_runs(*folders: str | Path) -> list[Run]:
    """Every run of some results folders, each digest once; damaged runs are left out with a warning."""
    runs: dict[str, Run] = {}
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"there is no folder {str(folder)!r}; give folders of sweeps")
    for path in (path for folder in folders for path in sorted(Path(folder).glob(RUNS))):
        try:
            runs.setdefault(path.parent.name, load_run(path.parent))
        except DamagedError as error:
            warnings.warn(f"{error}; this run is left out (the sweep's command repeats it)", stacklevel=2)
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
    """Whether a run's folder is complete. Raises DamagedError if it exists but cannot be read."""
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


def has_result(path: Path, config: Config, models: bool = False) -> bool:
    """Whether a run's folder is complete and can be read."""
    try:
        return is_finished(path, config, models)
    except DamagedError:
        return False


def check_format(folder: Path) -> None:
    """Refuses a folder with results of another format."""
    for path in folder.glob(RUNS):
        try:
            found = json.loads(path.read_text())["format"]
        except (ValueError, TypeError, KeyError):
            continue  # damaged: reported where it is read
        _check_format(path.parent, found)


def _check_format(folder: Path, found: int) -> None:
    if found != FORMAT:
        raise ConfigError(
            f"{folder} has results of format {found}, this version reads {FORMAT}; choose another folder "
            "with --results"
        )
