"""The commands: `python -m ubar_jax.experiments.sweep`, `.plot`, `.report`, `.bench`; logic is importable."""
