"""Many runs, nothing lost.

`plan` says what is left to do and does it; `groups` which runs share a program; `checkpoints` and `results`
are what is on disk; `progress` is what is shown meanwhile. May import everything but `experiments`.
"""
