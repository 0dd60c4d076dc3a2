"""What the simulator costs on a CPU, next to a serial one in torch: `python -m ubar_jax.experiments.bench`.

scenes: networks in the middle of a round, and the work to be measured on them, ours and the torch loop's.
measure: clocks, alternation, the machine's own limits. tables: the paper's time table with our targets.
growth: cost against degree, nodes and parameters. costs: attacks, whole sweeps, compilation. figures.
"""
