"""The rest is in pyproject.toml. Here: the flagfiles in experiments/ become a part of the package."""

from setuptools import find_packages, setup

FLAGFILES = "ubar_jax.experiments.flagfiles"  # looked up by ubar_jax/experiments/command.py

setup(
    packages=[*find_packages(include=["ubar_jax*"]), FLAGFILES],
    package_dir={FLAGFILES: "experiments"},
    package_data={"ubar_jax": ["py.typed"], FLAGFILES: ["*.flags", "paper/*/*.flags"]},
)
