import threading
import time
from concurrent.futures import ThreadPoolExecutor

from ubar_jax import Config
from ubar_jax.engine import compilation, devices
from ubar_jax.engine.preparation import prepare


def test_several_threads_compute_a_result_once():
    calls = []

    @compilation.once
    def slow(number):
        calls.append(number)
        time.sleep(0.05)
        return number + 1

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(slow, [1, 1, 2, 1, 2])) == [2, 2, 3, 2, 3]
    assert sorted(calls) == [1, 2]


def test_the_next_programs_are_compiled_while_one_runs(monkeypatch):
    compiled, done = [], threading.Event()

    def compile_it(*key):
        compiled.append((key, threading.current_thread()))
        done.set()

    monkeypatch.setattr(devices, "cores", lambda: 2)
    monkeypatch.setattr(compilation, "compiled_chunk", compile_it)
    names = ("average", "dkrum", "dmedian")
    programs = [(prepare(Config(rule=name, nodes=5)).program, 1) for name in names]
    packs = [programs[0], *programs]  # the first program has two packs
    with compilation.compiling_ahead(packs) as ahead:
        for i in range(2):
            ahead(i)
        assert done.wait(60)
    assert [key for key, _ in compiled] == programs[1:2]
    assert compiled[0][1] is not threading.main_thread()

    monkeypatch.setattr(devices, "cores", lambda: 1)
    with compilation.compiling_ahead(packs) as ahead:
        ahead(0)
    assert len(compiled) == 1  # no core is free


def test_the_sizes_of_a_program_do_not_depend_on_the_seed():
    settings = {"rule": "ubar", "attack": "bit_flip", "byzantine_ratio": 0.3, "nodes": 30, "batch_size": 8}
    programs = {prepare(Config(seed=seed, **settings)).program for seed in range(8)}
    assert len(programs) == 1
