"""`mpistrat plan`: its numbers follow from the constants by arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from mpistrat.bench import constants as of
from mpistrat.bench.plan import layouts, predict
from mpistrat.bench.plan_machine import Machine
from mpistrat.cli.main import main

ABOUT = {"cpu": "A CPU", "cores": 4, "memory_gib": 8, "ranks": 4, "nodes": 2, "date": "2026-01-01"}
STEPS = {"4.2 M": {"mpistrat, arenas": 0.014}}
FIXED = 1e-4
ALONE, TOGETHER = (
    (2e-3, 1e-3),
    (3e-3, 2e-3),
)  # seconds of a million parameters: sum of one gradient and update, a gradient more


def spread(value, width=0.0):
    return {"a rank": value, "least": value * (1 - width), "most": value * (1 + width)}


def document(alone=ALONE, together=TOGETHER, small=1.0, width=0.0, steps=STEPS, **about):
    """What bench writes, with parts of 262 K so many times as quick, and quartiles so far from each median."""
    values = {}
    for part in of.PARTS:
        share = small if part == "262 K" else 1.0
        for all_, costs in ((False, alone), (True, together)):
            for what, seconds in zip((of.UPDATE, of.GRADIENT), costs, strict=True):
                values[of.name_of(what, part, all_)] = spread(seconds * share, width)
    values[of.FIXED] = spread(FIXED)
    if about.get("nodes", 2) > 1:
        values |= {of.PING: spread(2e-5), of.EXCHANGE: spread(2e-5 + 2**20 / 1e9)}
    return {"machine": {**ABOUT, **about}, "benchmarks": {"constants": {"values": values}, "step": {"values": steps}}}


def machine(*documents, **about):
    return Machine.read(list(documents) or [document(**about)])


def test_constants_are_read_for_one_parameter_and_one_message():
    found = machine()
    assert found.alone[0].update == pytest.approx((2e-9,) * 3)
    assert found.together[-1].gradient == pytest.approx((2e-9,) * 3)
    assert found.ranks == 2 and found.memory == 8 * 2**30
    assert found.latency == pytest.approx(2e-5)
    # two ranks a node: each sends a MiB, and gets one, in 2**20 / 1e9 seconds
    assert found.network == pytest.approx((2e9,) * 3)


def test_one_rank_takes_what_its_core_takes():
    found = predict(machine(), 1e6, compute=0.0, nodes=1, ranks=1)
    assert found.memory == pytest.approx((2e-3, 2e-3))
    assert found.network == (0, 0)
    assert found.bytes == 4e6 * (1 + 1 + 2)
    assert found.gradient_bytes == 4e6
    assert found.expected == pytest.approx(2e-3 + FIXED)
    assert found.step == pytest.approx((0.92 * (2e-3 + FIXED), 1.08 * (2e-3 + FIXED)))
    assert found.doubt == ""


def test_more_ranks_share_the_memory_that_all_of_them_had():
    # two at once took 3 + 2 ns a parameter: 4e8 a second; alone 2 + 1, so two cores would do 6.7e8
    found = predict(machine(), 1e6, compute=0.0, nodes=1, ranks=2)
    assert found.memory == pytest.approx((2.5e-3, 2.5e-3))
    # where all at once are as fast as one, only the cores are known to be a limit
    free = machine(together=ALONE)
    assert predict(free, 1e6, 0.0, 1, 4).memory == pytest.approx((5e-9 / 4 * 1e6, 5e-9 / 2 * 1e6))
    # and so on a node with other cores
    other = predict(replace(machine(), cores=8), 1e6, 0.0, 1, 8)
    assert other.memory == pytest.approx(((2 + 7) / 8 * 1e-3, (3 + 7 * 2) / 2 * 1e-3))
    assert other.doubt == "the memory of such a node was not measured"


def test_compiled_loops_use_the_cores_that_no_rank_has():
    full = machine(nodes=1, compiled_loops=True)  # four ranks on four cores: each with one thread
    # one rank on four cores, 2 ns alone: memory allowed four ranks one in 3 ns at once
    assert predict(full, 1e6, 0.0, 1, 1).memory == pytest.approx((3 / 4 * 1e-3,) * 2)
    assert predict(full, 1e6, 0.0, 1, 4).memory == pytest.approx(((3 + 3 * 2) / 4 * 1e-3,) * 2)
    # where memory is no limit, the cores are
    free = machine(document(nodes=1, together=ALONE, compiled_loops=True))
    assert predict(free, 1e6, 0.0, 1, 1).memory == pytest.approx((2 / 4 * 1e-3,) * 2)


def test_parts_that_fit_into_caches_are_quicker():
    found = machine(small=0.5)
    assert predict(found, 1 << 18, 0.0, 1, 1).memory[0] == pytest.approx(2**18 * 1e-9)
    assert predict(found, 1 << 19, 0.0, 1, 1).memory[0] == pytest.approx(2**19 * 1.5e-9)  # in between, by the logarithm
    assert predict(found, 1 << 24, 0.0, 1, 1).memory[0] == pytest.approx(2**24 * 2e-9)


def test_quartiles_make_the_range():
    found = predict(machine(width=0.25), 1e6, 0.0, 1, 1)
    assert found.memory == pytest.approx((1.5e-3, 2.5e-3))
    assert found.doubt == "what was measured differs much"


def test_ranks_without_a_core_lose_what_was_measured():
    few = document(ranks=2, nodes=1, cores=2)
    # alone 2 + 2 gradients: on two cores, of which memory allows 2 / (3 + 2 * 2) ns: 3.5 ns a parameter, of 4.2 M 14.68 ms
    crowded = document(ranks=3, nodes=1, cores=2, steps={"4.2 M": {"mpistrat, arenas": 3.5e-9 * 2**22 + FIXED + 2e-3}})
    found = machine(few, crowded)
    assert found.ranks == 2 and found.crowded.steps == [pytest.approx((3.5e-9 * 2**22, 2e-3))]
    step = predict(found, 1 << 22, 0.0, 1, 3)
    assert step.expected == pytest.approx(3.5e-9 * 2**22 + FIXED + 2e-3)
    twice = predict(found, 1 << 23, 0.0, 1, 3)
    assert twice.expected == pytest.approx(3.5e-9 * 2**23 + FIXED + 4e-3)
    assert twice.doubt == "ranks share cores"
    unknown = predict(machine(few), 1 << 22, 0.0, 1, 3)
    assert unknown.expected == pytest.approx(1.25 * 3.5e-9 * 2**22 + FIXED * math.log2(3))


def test_the_network_carries_all_but_a_share_of_the_gradients_twice():
    found = predict(machine(), 1e9, compute=1.0, nodes=4, ranks=2)
    wire = 2 * 3 / 4 * 4e9 / 2e9
    rounds = math.ceil(4e9 / 2 / 2**20)
    assert found.network == pytest.approx((wire, wire + rounds * 6 * 2e-5))
    # two gradients of all parameters, and a quarter of the updates: alone 2 + 1 / 4 ns on two cores, together 4 + 1 / 4
    assert found.memory == pytest.approx((4.25 / 2, 4.25 / 2))
    assert found.step[0] == pytest.approx(1 + 0.92 * (wire + 1e-4))  # all of that while sums travel
    assert found.bytes == 4e9 * (1 + 2 + 2 / 4)
    assert found.bottleneck == "network" and not found.fits
    low, high = found.efficiency
    assert low == pytest.approx(1 / found.step[1]) and high == pytest.approx(1 / found.step[0]) and low < high < 1


def test_on_very_many_nodes_and_for_few_parameters_each_node_updates_all():
    many = predict(machine(), 16e9, 0.0, nodes=128, ranks=1)
    assert many.bytes == 16e9 * 4 * (1 + 1 + 2)
    assert many.memory == pytest.approx((16e9 * 2e-9, 16e9 * 2e-9))
    wire, chunks = 2 * 127 / 128 * 64e9 / 2e9, math.ceil(64e9 / 2**20)
    assert many.network == pytest.approx((wire, wire + chunks * 2 * 7 * 2e-5))
    assert predict(machine(), 1000.0, 0.0, nodes=2, ranks=2).bytes == 4000 * (1 + 2 + 2)
    # up to 64, each with blocks of 64 KiB of its piece in a round of 4 MiB
    few = predict(machine(), 16e9, 0.0, nodes=64, ranks=1)
    assert few.network[1] - few.network[0] == pytest.approx(math.ceil(64e9 / 2**22) * 2 * 63 * 2e-5)


def test_layouts_are_all_powers_of_two():
    assert len(list(layouts(6, 9))) == 3 * 4


def test_a_file_without_constants_is_refused(tmp_path, capsys):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"machine": ABOUT, "benchmarks": {}}))
    assert main(["plan", "--parameters", "1e6", "--compute", "0.1", "--like", str(file)]) == 2
    assert "--only constants" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        "--nodes 0",
        "--nodes -3",
        "--nodes 1.5",
        "--cores -1",
        "--parameters 0",
        "--parameters nan",
        "--compute -1",
        "--network -2",
        "--latency -4",
        "--memory 0",
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path, capsys, wrong):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document()))
    words = ["--parameters", "1e6", "--compute", "0.1", "--like", str(file)]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words, *wrong.split()])
    assert ended.value.code == 2
    assert wrong.split()[0] in capsys.readouterr().err


def test_a_wide_range_is_told_as_differences(tmp_path, capsys):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document(width=0.5, nodes=1)))
    assert main(["plan", "--parameters", "1e8", "--compute", "0", "--like", str(file)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    # 0.92 times half of what is expected, and 1.08 times one and a half, of which fixed costs are a thousandth
    assert "may differ by -54 to +62 % from what is expected" in text


def test_the_command_names_the_best_layout_and_meets_what_was_measured(tmp_path, capsys):
    file, out, plot = tmp_path / "bench.json", tmp_path / "plan.json", tmp_path / "plan.png"
    file.write_text(json.dumps(document(ranks=2, nodes=1)))
    words = [
        "--parameters",
        "1e8",
        "--compute",
        "0.5",
        "--like",
        str(file),
        "--nodes",
        "8",
        "--network",
        "10",
        "--latency",
        "5",
    ]
    assert main(["plan", *words, "--json", str(out), "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert "Best on 8 nodes: 1 rank each" in text  # more ranks need their gradients' sum, and are no faster here
    # 2**22 parameters by two ranks: 2**22 / 4e8 s, and what a step takes without any
    assert "2 ranks on 1 node: 4.2 M: 10.6 ms predicted, 14.0 ms measured" in " ".join(text.split())
    found = json.loads(out.read_text())
    assert found["machine"]["network"] == [1e10] * 3 and len(found["steps"]) == 4 * 3
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_without_a_network_it_is_one_node(tmp_path, capsys):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document(nodes=1)))
    assert main(["plan", "--parameters", "1e6", "--compute", "0.1", "--like", str(file)]) == 0
    text = capsys.readouterr().out
    assert "one node only" in text and "On 1 node:" in text
