"""Results on disk: one folder a sweep, in it one folder a run, named by the run's digest.

A run's folder appears whole or not at all: `config.json` (canonical), `curves.npz` (see `Result`),
`summary.json` (final numbers, divergence, seconds, versions, device), and on request `models.npz`, the
leaves of the final `RoundState` by their path.
"""

import dataclasses
import json
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ubar_jax.config import Config
from ubar_jax.registry import ConfigError
from ubar_jax.simulate import Result

FORMAT = 1


class Run(NamedTuple):
    """A finished run, read back."""

    config: Config
    curves: dict[str, np.ndarray]
    summary: dict[str, Any]


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


def save(folder: Path, result: Result, models: bool = False) -> Path:
    """Writes one run atomically and returns its folder."""
    final = folder / result.config.digest()
    part = Path(tempfile.mkdtemp(dir=folder, prefix=".part-"))
    try:
        _write_json(part / "config.json", dataclasses.asdict(result.config))
        np.savez_compressed(part / "curves.npz", accepted=result.accepted, **result.curves)
        _write_json(part / "summary.json", summarise(result))
        if models:
            state = result.state._replace(key=jax.random.key_data(result.state.key))
            leaves, _ = jax.tree_util.tree_flatten_with_path(state)
            named = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
            np.savez(part / "models.npz", **named)
        if final.exists():
            shutil.rmtree(final)
        os.rename(part, final)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return final


def summarise(result: Result) -> dict[str, Any]:
    """The numbers of a run that fit on a line, and where they come from."""
    curves = result.curves
    return {
        "format": FORMAT,
        **{name: float(curves[name][-1]) for name in ("worst", "mean", "std", "consensus")},
        "accuracy": result.final["accuracy"].tolist(),
        "loss": result.final["loss"].tolist(),
        "diverged": result.diverged,
        "notices": result.notices,
        "seconds": result.seconds,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "device": str(jax.devices()[0].device_kind),
    }


def load_runs(folder: str | Path) -> list[Run]:
    """Every whole run of a results folder, in the order of their digests."""
    return [load_run(path.parent) for path in sorted(Path(folder).glob("[!.]*/summary.json"))]


def load_run(folder: Path) -> Run:
    """One run, if this version can read it."""
    summary = json.loads((folder / "summary.json").read_text())
    if summary.get("format") != FORMAT:
        raise ConfigError(
            f"{folder} has results of format {summary.get('format')}, this version reads {FORMAT}; choose "
            "another folder with --results"
        )
    config = Config(**json.loads((folder / "config.json").read_text()))
    with np.load(folder / "curves.npz") as arrays:
        curves = dict(arrays)
    return Run(config, curves, summary)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
