"""The parts that users can add to: each is one function in a registry.

`aggregation` (rules), `byzantine` (attacks), `topology`, `data` (data sets and shardings), `tasks` (models),
`optimisation` (optimizers and schedules). May import `types`, `registry`, `files`, `memory` and `numerics`.
"""
