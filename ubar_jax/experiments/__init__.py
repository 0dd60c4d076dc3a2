"""Commands: `python -m ubar_jax.experiments.sweep`, `.plot`, `.report`, `.bench`; also importable.

`command`: flags, error messages and exit codes, shared by all. May import everything; nothing imports it.
"""
