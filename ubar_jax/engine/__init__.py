"""What compiles and runs: from a Config to its curves.

`program` is what decides compiled code; `preparation` checks a config and puts its arrays together; `round`
is the algorithm; `compilation` compiles; `evaluation` tests all benign nodes; `simulation` runs. May import
everything but `sweeps` and `experiments`.
"""
