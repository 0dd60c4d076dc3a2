"""CPU benchmarks, compared with two torch programs: `python -m ubar_jax.experiments.bench`.

`scenes`: networks in the middle of a round, and the work to measure on them, ours and torch's.
`measure`: timing in turns, and the machine's limits. `tables`: the paper's time table with our targets.
`growth`: cost against degree, nodes and parameters. `costs`: attacks, whole sweeps, compilation. `figures`.
"""
