"""Commands: `python -m ubar_jax.experiments.sweep`, `.plot`, `.report`, `.bench`; also importable."""
