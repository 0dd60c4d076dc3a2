"""The torch programs compute the same rounds as ubar_jax; the benchmark's timing and tables."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reference

from ubar_jax.engine.round import ravel
from ubar_jax.experiments.bench import growth, measure, scenes, tables
from ubar_jax.parts.aggregation import rules
from ubar_jax.testing import by_reference, counts_of, random_case

torch = pytest.importorskip("torch", reason="the torch programs need torch: pip install -e '.[benchmark]'")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

pytestmark = pytest.mark.medium

FOLDER = Path(__file__).parents[2] / "benchmarks"
programs = scenes.load_torch(FOLDER)
serial, tuned = programs["loop"], programs["tuned"]
PARAMETERS = {"mlp": 79_510, "lenet": 61_706, "cnn": 977_866}


@pytest.mark.parametrize("name", serial.RULES)
def test_torch_rule_equals_its_reference(name):
    rule = rules.parse(name)
    counting = rule.traits.count

    def in_torch(node, **arguments):
        own, messages = torch.from_numpy(node.own), torch.from_numpy(node.messages)
        count = 0
        if counting is not None:
            (count,) = counting(np.array([node.degree]), np.array([node.byzantine]), **rule.of(counting))

        def loss(x):
            return torch.tensor(node.loss(x.numpy()), dtype=torch.float64)

        return serial.RULES[name](own, messages, count, node.own_loss, loss).numpy(), None

    for seed in range(60):
        case = random_case(seed, least=1 + seed % 4)
        mixed, *_ = by_reference(rule, in_torch, case)
        expected, *_ = by_reference(rule, getattr(reference, name), case)
        np.testing.assert_allclose(mixed, expected, rtol=1e-9, atol=1e-9, err_msg=f"seed {seed}")


@pytest.mark.parametrize("name", tuned.RULES)
def test_tuned_rule_equals_its_reference(name):
    """For all receivers at once, with attackers among the senders."""
    rule = rules.parse(name)
    for seed in range(60):
        case = random_case(seed, least=1 + seed % 4)
        own, sent, targets = (torch.from_numpy(a.astype(float)) for a in (case.own, case.sent, case.targets))
        network = tuned.make_network(scenes.neighbours_of(case.graph)[: len(own)], counts_of(rule, case)[2])

        def losses(receiver, sender, sent=sent, targets=targets):
            return (sent[sender] - targets[receiver]).square().mean(1)

        own_losses = (own - targets).square().mean(1)
        mixed = tuned.RULES[name](sent, network, own_losses, losses)
        expected, *_ = by_reference(rule, getattr(reference, name), case)
        np.testing.assert_allclose(mixed, expected, rtol=1e-9, atol=1e-9, err_msg=f"seed {seed}")


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13, 21])
def test_networks_sort_and_trim(size):
    values = torch.randn(size, 200).unbind()
    ordered = torch.stack(values).sort(0).values
    assert torch.equal(torch.stack(tuned.compare(values, tuned.batcher(size))), ordered)
    for cut in range((size + 1) // 2):
        network = tuned.trimming(size, cut)
        assert len(network) <= len(tuned.batcher(size))
        assert torch.allclose(
            tuned.middle_of_sorted(values, cut), ordered[cut : size - cut].mean(0), atol=1e-6
        )
    assert not tuned.trimming(size, 0)


@pytest.fixture(scope="module", params=PARAMETERS)
def scene(request):
    return scenes.make_scene(request.param, benign=6, batch=8)


def in_our_layout(scene, vectors):
    """[n, d] torch's vectors, with their parameters in our order."""
    ours = np.empty(scene.own.shape, np.float32)
    ours[:, scenes.torch_layout(scene)] = vectors
    return ours


def test_torch_model_has_our_parameters_and_our_output(scene):
    model = serial.MODELS[scene.model]()
    assert sum(p.numel() for p in model.parameters()) == scene.own.shape[1] == PARAMETERS[scene.model]
    vector = np.asarray(scene.own[0])[scenes.torch_layout(scene)]
    serial.vector_to_parameters(torch.from_numpy(vector), model.parameters())
    x = np.asarray(scene.batch[0][0])
    ours = scene.task.predict(scene.unravel(scene.own[0]), x)
    with torch.no_grad():
        theirs = model(torch.from_numpy(np.moveaxis(x, -1, 1).copy()))
    assert np.abs(ours).max() > 0.1
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-4)


def test_measured_rounds_and_training_are_the_same_computation(scene):
    """Compares losses and new models, and so the gradients, of our round and those of the torch programs."""
    for rule in ("average", "ubar") if scene.model == "mlp" else ("ubar",):
        state, _ = measure.ready(*scenes.whole_round(scene, rule))()
        new = ravel(state.params)
        assert np.abs(new - scene.own).max() > 1e-3
        for program in programs.values():
            losses, vectors = scenes.in_torch(scene, scenes.ROUND + rule, program)()
            np.testing.assert_allclose(losses, scene.own_loss, rtol=1e-5, atol=1e-6)
            theirs = in_our_layout(scene, np.stack(list(vectors)))
            np.testing.assert_allclose(new, theirs, rtol=1e-5, atol=2e-6)
    losses, gradient = measure.ready(*scenes.training(scene))()
    np.testing.assert_allclose(losses, scene.own_loss, rtol=1e-5)
    for program in programs.values():
        np.testing.assert_allclose(losses, scenes.in_torch(scene, scenes.TRAINING, program)(), rtol=1e-5)
    assert ravel(gradient).shape == scene.own.shape


def test_operations_are_counted_as_torch_counts_them(scene):
    loop = scenes.in_torch(scene, scenes.TRAINING, serial)
    with FlopCounterMode(display=False) as counter:
        loop()
    assert scenes.training_flops(scene) == counter.get_total_flops()


def test_a_measured_aggregation_is_the_same_computation():
    """Ours and those of the torch programs, with real losses."""
    scene = scenes.make_scene("mlp", benign=8, batch=16)
    for name in serial.RULES:
        ours = measure.ready(*scenes.one_aggregation(scene, name))()
        for column, program in programs.items():
            if theirs := scenes.in_torch(scene, name, program):
                np.testing.assert_allclose(
                    *(ours, in_our_layout(scene, np.stack(list(theirs())))),
                    **{"rtol": 1e-4, "atol": 1e-5, "err_msg": f"rule {name}, {column}"},
                )


def test_work_in_a_run_is_the_work_of_a_row_again_and_again():
    scene = scenes.make_scene("mlp", benign=8, batch=16)
    again, once = (make(scene, "dmedian") for make in (scenes.ours_in_a_run, scenes.ours))
    found, moved = measure.ready(*again)(), scene
    for _ in range(scenes.ROUNDS):
        moved = moved._replace(own=measure.ready(once[0], ((moved.own, *once[1][0][1:]), once[1][1]))())
    np.testing.assert_array_equal(found, moved.own)
    stepped, params = measure.ready(*scenes.ours_in_a_run(scene, scenes.TRAINING))(), scene.own
    for _ in range(scenes.ROUNDS):
        _, gradient = measure.ready(*scenes.training(scene._replace(own=params)))()
        params = params - scenes.RATE * ravel(gradient)
    assert np.abs(params - scene.own).max() > 1e-3
    np.testing.assert_allclose(stepped, params, rtol=1e-5, atol=1e-6)


def test_work_is_done_in_turns_until_the_budget_is_spent():
    """The first call is a warm-up; the median of the others is reported."""
    order, now = [], [0.0]

    def work(name, times):
        times = iter(times)

        def call():
            order.append(name)
            now[0] += next(times)

        return call

    def measured(a, b, **options):
        order.clear()
        return measure.seconds([work("a", a), work("b", b)], 3, clock=lambda: now[0], **options)

    assert measured([9 / 8, 1, 3, 2], [1, 0.5, 0.25, 0.5]) == [2, 0.5]
    assert order == ["a", "b"] * 4
    assert measured([measure.BUDGET, 1], [1, 2]) == [1, 2]
    assert order == ["a", "b"] * 2
    assert measured([1, 0.5, 1.5, 1, 1.5, 1.5], [0.5] * 6, least=9) == [1.5, 0.5]
    assert order == ["a", "b"] * 6


def test_a_power_law_is_fitted_where_asked():
    sizes = np.array([1, 2, 4, 8, 16, 32])
    times = np.where(sizes < 8, 5.0, 3 * sizes**1.5)
    assert growth.exponent(sizes, times, least=8) == pytest.approx(1.5)


def test_growth_beyond_its_targets_is_marked():
    grown = {key: {"exponents": dict.fromkeys(tables.PAPER, 1.0)} for key in growth.AXES}
    grown["n"]["exponents"]["ubar"] = 1.2
    marked = [line.split()[0] for line in growth.exponent_table(grown).splitlines() if "missed" in line]
    assert marked == ["ubar"]
    taken = {"dmedian": [9, 1, 2, 2.5], "bridge": [1, 1, 3, 2]}
    told = growth.slot_table({"sizes": [8, 32, 64, 128], "ns_per_value_and_slot": taken}).splitlines()
    assert "grows 2.5 times" in told[1] and "missed" not in told[1]
    assert "grows 3.0 times" in told[2] and "missed" in told[2]


def test_a_row_shows_ratios_targets_and_shares():
    columns = (tables.OURS, "loop", "tuned")
    found = {"seconds": {"ubar_jax": 0.5, "loop": 1.0}, "ratio": {"loop": 2.0}, "target": {"loop": 8}}
    found["share"] = {"ubar_jax": 0.25, "loop": 0.125}
    words = "dmedian 0.5000 25.0% 1.0000 12.5% 2.00 8 - - - - missed: loop"
    assert tables.line("dmedian", found, columns).split() == words.split()
    assert "missed" not in tables.line("dmedian", found | {"target": {"loop": 2}}, columns)
    alone = tables.line("mine", {"seconds": {"ubar_jax": 0.5}, "ratio": {}, "target": {}}, columns[:1])
    assert alone.split() == ["mine", "0.5000", "-"]


def test_shares_are_of_what_was_measured(monkeypatch, capsys):
    """A machine of 1 GFLOP/s and 1 GB/s and given seconds: the shares can be checked by hand."""
    monkeypatch.setattr(tables, "limits", lambda *_: {"peak_gflops": 1.0, "bandwidth_gbs": 1.0})
    monkeypatch.setattr(tables, "seconds", lambda work, *_: [2.0, 4.0, 3.0, 3.0][: len(work)])
    monkeypatch.setattr(tables, "NODES", 6)
    monkeypatch.setattr(tables, "BATCH", 8)
    table = tables.time_tables(["mlp"], [scenes.TRAINING, "ubar"], 1, programs)["mlp"]
    flops = 2 * (2 * 784 * 100 + 3 * 100 * 10) * 6 * 8
    shares = {"ubar_jax": flops / 2e9, "loop": flops / 4e9, "tuned": flops / 3e9}
    assert table["training"]["share"] == pytest.approx(shares)
    assert table["ubar"]["share"]["ubar_jax"] == pytest.approx(2 * 4 * 6 * 79_510 / 2e9)
    assert table["ubar"]["ratio"] == {"loop": 2, "tuned": 1.5}
    assert table["ubar"]["target"] == {"loop": 1.3, "tuned": 1.38}
    assert "mlp, d = 79,510" in capsys.readouterr().out


def test_every_column_of_wall_seconds_has_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(tables, "limits", lambda *_: {"peak_gflops": 1.0, "bandwidth_gbs": 1.0})
    monkeypatch.setattr(tables, "NODES", 6)
    monkeypatch.setattr(tables, "BATCH", 8)
    told = {"ubar_jax": {"dkrum": 0.5}, "1 device": {"dkrum": 1.0}, "loop": {"dkrum": 3.0}, "tuned": {}}
    monkeypatch.setattr(tables, "_alone", lambda model, column, *_: told[column])
    row = tables.wall_tables(["mlp"], ["dkrum"], 1, programs, "benchmarks")["mlp"]["dkrum"]
    assert row["seconds"] == {"ubar_jax": 0.5, "1 device": 1.0, "loop": 3.0}
    assert row["ratio"] == {"loop": 6} and row["target"] == {}


def test_a_column_is_timed_in_another_process():
    for column in ("ubar_jax", "1 device", "tuned"):
        found = tables._alone("mlp", column, ["training", "ios"], 1, str(FOLDER))
        assert found.keys() == ({"training"} if column == "tuned" else {"training", "ios"})
        assert all(0 < spent < 60 for spent in found.values())


def test_the_command_writes_a_section(tmp_path):
    """Runs the fastest section as a user does; an unknown section is refused with the list of sections."""
    command = [sys.executable, "-m", "ubar_jax.experiments.bench", "--repeats=1", f"--results={tmp_path}"]
    subprocess.run([*command, "peak"], check=True, timeout=300, stdout=subprocess.DEVNULL)
    found = json.loads((tmp_path / "peak.json").read_text())
    assert found["cores"] == 1
    assert found["peak"]["peak_gflops"] > 0.1 and found["peak"]["bandwidth_gbs"] > 0.01
    refused = subprocess.run([*command, "peek"], capture_output=True, text=True, timeout=300)
    assert refused.returncode != 0 and "there are wall, peak, training" in refused.stdout + refused.stderr
