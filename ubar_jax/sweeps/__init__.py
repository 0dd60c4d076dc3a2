"""Plan and run many runs; resume after interruption.

`plan`: find what is left to do, and do it. `groups`: runs that share a program. `cluster`, `worker`: the same
on many processes or machines. `checkpoints`, `results`: files on disk. May import everything but
`experiments`.
"""
