"""Plan and run many runs; resume after interruption.

`plan`: find what is left to do, and do it. `groups`: runs that share a program. `checkpoints`, `results`:
files on disk. `progress`: the progress bar. May import everything but `experiments`.
"""
