"""`mpistrat plan`: its numbers follow from the constants by arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from mpistrat.bench import constants as of
from mpistrat.bench.plan import Machine, layouts, predict
from mpistrat.cli.main import main

ABOUT = {"cpu": "A CPU", "cores": 4, "memory_gib": 8, "ranks": 4, "nodes": 2, "date": "2026-01-01"}
STEPS = {"4.2 M": {"mpistrat, arenas": 0.014}}
FIXED, PING = 1e-4, 2e-5
# Seconds of a million parameters of a rank: alone, and all at once, in pairs with two gradients.
ALONE, TOGETHER, GRADIENT = 2e-3, 4e-3, 1e-3
NETWORK = 2e9  # bytes a second
# Two nodes of two ranks, 2**21 parameters each: a node updates half of them in 3 / 2 ns, and sums one gradient and a half more in
# 1 / 2 ns each; 2**23 bytes of each rank travel in rounds of a MiB, one latency each; half of 2**24 bytes, twice
OVER_NODES = 2**22 * (1.5 / 2 + 1.5 * 0.5) * 1e-9 + FIXED + 8 * PING + 2**24 / NETWORK


def spread(value, width=0.0):
    return {"a rank": value, "least": value * (1 - width), "most": value * (1 + width)}


def document(
    alone=ALONE, together=TOGETHER, gradient=GRADIENT, small=1.0, width=0.0, steps=STEPS, crowded=None, **about
):
    """What bench writes, with parts of 393 K so many times as quick, and quartiles so far from each median."""
    values = {of.FIXED: spread(FIXED)}
    for part in of.PARTS:
        share = small if part == "393 K" else 1.0
        for what, seconds in ((of.ALONE, alone), (of.TOGETHER, together), (of.GRADIENT, gradient)):
            values[of.name_of(what, part)] = spread(seconds * share, width)
    if about.get("nodes", 2) > 1:
        values |= {of.PING: spread(PING), of.name_of(of.STEP, "2.1 M"): spread(OVER_NODES)}
    if crowded is not None:
        values = {
            of.FIXED: spread(FIXED),
            **{of.name_of(of.STEP, part): spread(each) for part, each in crowded.items()},
        }
    return {"machine": {**ABOUT, **about}, "benchmarks": {"constants": {"values": values}, "step": {"values": steps}}}


def machine(*documents, **about):
    return Machine.read(list(documents) or [document(**about)])


def test_constants_are_read_for_one_parameter_and_one_message():
    found = machine()
    # two ranks a node, each with a parameter in that time, of which each gradient takes a part
    assert found.node.parts[-1].gradient == pytest.approx((1e-9 / 2,) * 3)
    assert found.node.parts[0].alone == pytest.approx((2e-9 - 1e-9 / 2,) * 3)
    assert found.node.parts[0].together == pytest.approx((4e-9 / 2 - 1e-9,) * 3)
    assert found.node.parts[-1].size == 3 << 23
    assert found.node.ranks == 2 and found.memory == 8 * 2**30
    assert found.latency == pytest.approx(2e-5)
    # what the step took longer than its sums, updates, and waiting
    assert found.network == pytest.approx((2e9,) * 3)


def test_a_network_that_adds_nothing_is_no_error():
    hidden = document()
    hidden["benchmarks"]["constants"]["values"][of.name_of(of.STEP, "2.1 M")] = spread(1e-3)
    assert predict(machine(hidden), 1e6, 0.0, 2, 2).network[1] < 1e-4


def test_one_rank_takes_what_it_took_alone():
    found = predict(machine(), 1e6, compute=0.0, nodes=1, ranks=1)
    assert found.memory == pytest.approx((2e-3, 2e-3))
    assert found.network == (0, 0)
    assert found.bytes == 4e6 * (1 + 1 + 2)
    assert found.gradient_bytes == 4e6
    assert found.expected == pytest.approx(2e-3 + FIXED)
    assert found.step == pytest.approx((0.92 * (2e-3 + FIXED), 1.08 * (2e-3 + FIXED)))
    assert found.doubt == "" and found.threads == 1


def test_loops_of_one_core_each_are_as_many_times_as_quick_up_to_the_memory():
    # 3 / 2 ns of all at once is more than 2 / 2 ns of two cores; and another gradient
    found = predict(machine(), 1e6, compute=0.0, nodes=1, ranks=2)
    assert found.memory == pytest.approx((2e-3, 2e-3))
    # two were measured of four cores: four are at best twice as quick, at worst as quick; three gradients more
    more = predict(machine(), 1e6, 0.0, 1, 4)
    assert more.memory == pytest.approx((1.5e-3, 3e-3))
    assert more.expected == pytest.approx(3e-3 / math.sqrt(2) + FIXED * 2)
    # three that were all measured: 2 / 3 ns each of three cores, where the memory is no limit
    free = machine(document(nodes=1, together=ALONE, gradient=0.0))
    assert predict(free, 1e6, 0.0, 1, 3).memory == pytest.approx((2e-3 / 3,) * 2)


def test_compiled_loops_use_the_cores_that_no_rank_has():
    full = machine(nodes=1, alone=1e-3, compiled_loops=True)  # four ranks on four cores
    one, two, four = (predict(full, 1e6, 0.0, 1, ranks) for ranks in (1, 2, 4))
    assert one.memory == pytest.approx((1e-3,) * 2)  # by one rank with four threads
    assert four.memory == pytest.approx(((3 / 4 + 3 * 1 / 4) * 1e-3,) * 2)
    assert two.memory == pytest.approx(((3 / 4 + 1 / 4) * 1e-3,) * 2)
    assert (one.threads, two.threads, four.threads) == (4, 2, 1)


def test_other_cores_are_between_as_quick_and_as_many_times_as_quick():
    known = machine(nodes=1, alone=1e-3, compiled_loops=True)
    more = predict(replace(known, cores=16), 1e6, 0.0, 1, 1)
    assert more.memory == pytest.approx((0.25e-3, 1e-3))
    assert more.expected == pytest.approx(0.5e-3 + FIXED)
    assert more.doubt == "the memory of such a node was not measured"
    fewer = predict(replace(known, cores=1), 1e6, 0.0, 1, 1)
    assert fewer.memory == pytest.approx((1e-3, 4e-3))


def test_parts_that_fit_into_caches_are_quicker():
    found = machine(small=0.5)  # 1 ns
    least = 3 << 17
    assert predict(found, least / 2, 0.0, 1, 1).memory[0] == pytest.approx(least / 2 * 1e-9)
    assert predict(found, least, 0.0, 1, 1).memory[0] == pytest.approx(least * 1e-9)
    between = least * math.sqrt(2)  # to the next, by the logarithm
    assert predict(found, between, 0.0, 1, 1).memory[0] == pytest.approx(between * 1.5e-9)
    assert predict(found, 1 << 27, 0.0, 1, 1).memory[0] == pytest.approx(2**27 * 2e-9)
    # a rank of four threads has four parts
    threads = machine(nodes=1, small=0.5, compiled_loops=True)
    assert predict(threads, 4 * least, 0.0, 1, 1).memory[0] == pytest.approx(4 * least * 1e-9)


def test_quartiles_make_the_range():
    found = predict(machine(width=0.25), 1e6, 0.0, 1, 1)
    assert found.memory == pytest.approx((1.5e-3, 2.5e-3))
    assert found.doubt == "measurements vary"


def test_ranks_without_a_core_lose_what_was_measured():
    few = document(ranks=2, nodes=1, cores=2)
    # three gradients, 3 / 2 ns for the first and 1 / 2 for each other: 2.5 ns; 3 * 2**20 parameters
    should = 3 * 2**20 * 2.5e-9
    crowded = document(ranks=3, nodes=1, cores=2, crowded={"1 M": should + FIXED + 2e-3})
    found = machine(few, crowded)
    assert found.node.ranks == 2 and found.crowded.ranks == 3
    assert found.crowded.steps == [(pytest.approx(should), pytest.approx((2e-3,) * 3))]
    step = predict(found, 3 << 20, 0.0, 1, 3)
    assert step.expected == pytest.approx(should + FIXED + 2e-3)
    assert predict(found, 3 << 19, 0.0, 1, 3).expected == pytest.approx(should / 2 + FIXED + 2e-3)
    twice = predict(found, 6 << 20, 0.0, 1, 3)
    assert twice.expected == pytest.approx(2 * should + FIXED + 4e-3)
    # four, 3 ns: they may lose as much, nothing, or twice as much
    four = predict(found, 2.5 * 2**20, 0.0, 1, 4)
    assert four.expected == pytest.approx(should + FIXED + 2e-3)
    assert four.step == pytest.approx((0.92 * (should + FIXED), 1.08 * (should + FIXED + 4e-3)))
    unknown = predict(machine(few), 3 << 20, 0.0, 1, 3)
    assert unknown.expected == pytest.approx(1.25 * should + FIXED * math.log2(3))
    assert unknown.step[0] == pytest.approx(0.92 * (should + FIXED)) and unknown.doubt == "ranks share cores"


def test_ranks_without_a_core_may_wait_for_messages_while_others_compute():
    few = document(ranks=4, nodes=2, cores=2)
    found = machine(few)
    step = predict(found, 1 << 22, 0.0, 2, 4)  # twice as many as cores
    should = 2**22 * (1.5 / 2 + 3.5 * 0.5) * 1e-9
    wire = 2**24 / NETWORK + 4 * PING
    fixed = FIXED * math.log2(8) / math.log2(4)
    assert step.expected == pytest.approx(should + wire + fixed)
    assert step.step[0] == pytest.approx(0.92 * (should + wire / 2 + FIXED))
    hops = 2 * PING
    assert step.step[1] == pytest.approx(1.08 * (1.5 * should + step.network[1] + fixed + hops))


def test_the_network_adds_all_but_a_share_of_the_gradients_twice():
    found = predict(machine(), 1e9, compute=1.0, nodes=4, ranks=2)
    wire = 2 * 3 / 4 * 4e9 / NETWORK
    rounds = math.ceil(4e9 / 2 / 2**20)
    # all six messages of a round travel at once, or after each other
    assert found.network == pytest.approx((wire + rounds * 2e-5, wire + rounds * 6 * 2e-5))
    # two gradients of all parameters, and a quarter of the updates
    memory = 1.5 / 4 + (2 - 1 / 4) * 0.5
    assert found.memory == pytest.approx((memory, memory))
    height = math.log2(8) / math.log2(4)
    assert found.expected == pytest.approx(1 + memory + wire + rounds * 2e-5 + FIXED * height)
    assert found.bytes == 4e9 * (1 + 2 + 2 / 4)
    assert found.bottleneck == "network" and not found.fits
    low, high = found.efficiency
    assert low == pytest.approx(1 / found.step[1]) and high == pytest.approx(1 / found.step[0]) and low < high < 1
    # of a network whose speed was told, all may be hidden, or half as it is
    told = predict(replace(machine(), adds=False), 1e9, 1.0, 4, 2)
    assert told.step[0] == pytest.approx(1 + 0.92 * (wire + rounds * 2e-5 + FIXED))
    assert told.expected == pytest.approx(found.expected - memory / 2)


def test_on_very_many_nodes_and_for_few_parameters_each_node_updates_all():
    many = predict(machine(), 16e9, 0.0, nodes=128, ranks=1)
    assert many.bytes == 16e9 * 4 * (1 + 1 + 2)
    assert many.memory == pytest.approx((16e9 * 2e-9, 16e9 * 2e-9))
    wire, chunks = 2 * 127 / 128 * 64e9 / 2e9, math.ceil(64e9 / 2**20)
    assert many.network == pytest.approx((wire + chunks * 2 * 7 * 2e-5,) * 2)  # each waits for the one before
    assert predict(machine(), 1000.0, 0.0, nodes=2, ranks=2).bytes == 4000 * (1 + 2 + 2)
    # up to 64, each with blocks of 64 KiB of its piece in a round of 4 MiB
    few = predict(machine(), 16e9, 0.0, nodes=64, ranks=1)
    assert few.network[1] - few.network[0] == pytest.approx(math.ceil(64e9 / 2**22) * (2 * 63 - 1) * 2e-5)


def test_layouts_are_divisors_of_the_cores_and_powers_of_two_up_to_the_nodes():
    found = list(layouts(6, 9))
    assert found == [(nodes, ranks) for nodes in (1, 2, 4, 8, 9) for ranks in (1, 2, 3, 6)]
    assert list(layouts(1, 1)) == [(1, 1)]


def refused(tmp_path, capsys, found):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(found))
    assert main(["plan", "--parameters", "1e6", "--compute", "0.1", "--like", str(file)]) == 2
    return capsys.readouterr().err


def test_a_file_of_an_older_version_is_refused(tmp_path, capsys):
    older = {
        "sum and update of 1 M parameters, 1 gradient; parts of 262 K, one rank": spread(2e-3),
        of.FIXED: spread(FIXED),
    }
    found = {"machine": {**ABOUT, "nodes": 1}, "benchmarks": {"constants": {"values": older}}}
    told = refused(tmp_path, capsys, found)
    assert "this version of mpistrat bench" in told and "--only constants" in told
    over_nodes = document()
    del over_nodes["benchmarks"]["constants"]["values"][of.name_of(of.STEP, "2.1 M")]
    assert "a step over nodes" in refused(tmp_path, capsys, over_nodes)


def test_a_file_of_ranks_that_share_cores_is_not_enough(tmp_path, capsys):
    assert "at most as many ranks as cores" in refused(
        tmp_path, capsys, document(nodes=1, ranks=5, crowded={"1 M": 1e-2})
    )


def test_a_file_without_constants_is_refused(tmp_path, capsys):
    assert "--only constants" in refused(tmp_path, capsys, {"machine": ABOUT, "benchmarks": {}})


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
    pytest.importorskip("matplotlib")
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
    # 2**22 parameters by two ranks: in 3 / 2 and 1 / 2 ns each, and what a step takes without any
    assert "2 ranks on 1 node: 4.2 M: 8.5 ms predicted, 14.0 ms measured" in " ".join(text.split())
    found = json.loads(out.read_text())
    assert found["machine"]["network"] == [1e10] * 3 and len(found["steps"]) == 4 * 3
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_without_a_network_it_is_one_node(tmp_path, capsys):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document(nodes=1)))
    assert main(["plan", "--parameters", "1e6", "--compute", "0.1", "--like", str(file)]) == 0
    text = capsys.readouterr().out
    assert "one node only" in text and "On 1 node:" in text
