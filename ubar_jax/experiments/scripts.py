"""The console commands `ubar-sweep`, `ubar-plot`, `ubar-report`, `ubar-bench` and `ubar-reproduce`."""

import runpy


def run_sweep() -> None:
    """`python -m ubar_jax.experiments.sweep`."""
    _run("sweep")


def run_plot() -> None:
    """`python -m ubar_jax.experiments.plot`."""
    _run("plot")


def run_report() -> None:
    """`python -m ubar_jax.experiments.report`."""
    _run("report")


def run_bench() -> None:
    """`python -m ubar_jax.experiments.bench`."""
    _run("bench")


def run_reproduce() -> None:
    """`python -m ubar_jax.experiments.reproduce`."""
    _run("reproduce")


def _run(name: str) -> None:
    # As the main module: absl shows the flags and the docstring of that one for --help.
    runpy.run_module(f"ubar_jax.experiments.{name}", run_name="__main__", alter_sys=True)
