"""The final models of twelve runs equal recorded hashes, bit for bit.

Bits depend on XLA's version and the processor; the test is skipped unless a hash was recorded for both.
After an intended change of the numbers, record new hashes with `python tests/engine/test_bits.py` and give
the largest differences in the commit message.
"""

import hashlib
import json
import platform
from pathlib import Path

import jax
import jaxlib
import numpy as np
import pytest

from ubar_jax import Config, simulate

HASHES = Path(__file__).with_name("bits.json")
IMAGES = "synthetic(examples=400, size=12)"
RUNS = {
    "ubar": {"attack": "gaussian"},
    "average": {"attack": "none"},
    "dkrum": {"attack": "mhamdi", "topology": "complete"},
    "dmedian": {"attack": "alie", "topology": "torus", "nodes": 11, "dataset": IMAGES, "model": "lenet"},
    "dbulyan": {"attack": "ipm_optimised"},
    "bridge(variant=K)": {"attack": "fang_krum", "optimizer": "momentum"},
    "geometric_median": {"attack": "dissensus", "topology": "random_regular"},
    "ubar_loss": {"attack": "sleeper(isolation, start=2)"},
    "ubar_distance": {"attack": "label_flip", "sharding": "dirichlet"},
    "multi_krum(m=2)": {"attack": "min_max", "topology": "small_world"},
    "ubar(rho=0.6)": {"attack": "bit_flip", "dataset": IMAGES, "model": "cnn", "optimizer": "adam"},
    "bridge(original=True)": {"attack": "theorem1", "topology": "ring", "schedule": "constant"},
}


def machine() -> str:
    """What the bits may depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    features = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    told = hashlib.sha256(" ".join(sorted(features)).encode()).hexdigest()[:8]
    return f"jaxlib {jaxlib.__version__}, {jax.default_backend()}, {platform.machine()} {told}"


def models_of(rule: str) -> str:
    settings = {"nodes": 7, "byzantine_ratio": 0.3, "batch_size": 8, "rounds": 5, "eval_every": 2}
    result = simulate(Config(rule=rule, **settings | RUNS[rule]))
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(result.state.params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RUNS)
def test_models_have_the_same_bits(rule):
    known = json.loads(HASHES.read_text())
    if rule not in known.get(machine(), {}):
        told = ", ".join(name for name, hashes in known.items() if rule in hashes)
        pytest.skip(f"no hash of {rule} recorded for {machine()}, only for {told}")
    assert models_of(rule) == known[machine()][rule]


if __name__ == "__main__":
    known = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    known[machine()] = {rule: models_of(rule) for rule in RUNS}
    HASHES.write_text(json.dumps(known, indent=1) + "\n")
