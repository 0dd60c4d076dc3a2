"""Commands: `python -m ubar_jax.experiments.sweep`, `plot`, `report`, `bench`, `reproduce`; importable, too.

`command`: flags, error messages and exit codes, shared by all. `notebook`: sweeps from Python. `grouping`:
runs grouped by settings, and labels; `drawing`: figures of single runs; `pictures`: figures that notebooks
show. May import everything; nothing imports it but the methods of a `Result` that draw.
"""
