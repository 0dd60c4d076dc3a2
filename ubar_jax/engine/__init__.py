"""Compile and run a Config; return its curves.

`program`: what determines the compiled code. `preparation`: check a config and build its arrays. `round`: the
algorithm. `compilation`: compile, with a persistent cache. `evaluation`: test all benign nodes. `simulation`:
run. May import everything but `sweeps` and `experiments`.
"""
