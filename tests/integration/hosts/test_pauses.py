"""Hosts that cannot reach each other for a while, and a rank that is stopped: nobody is taken for dead, and bits are the same.

MPISTRAT_PAUSE=90 makes pauses that long; more than 10 seconds, and a warning says who is waited for.
"""

import os
import subprocess
import threading
import time

import pytest

pytestmark = pytest.mark.timeout(400)

SECONDS = float(os.environ.get("MPISTRAT_PAUSE", "6"))
PROGRAM = """
import hashlib, os, socket, time
import numpy as np
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = ms.Variable(np.zeros(50_000), name="w")
    optimizer = ms.optimizers.Adam(0.1)
rows = np.random.default_rng(0).normal(size=(80, 100))
data = strategy.distribute_dataset(ms.data.from_arrays(rows).shuffle(seed=1).batch(8))
longest, last, steps = 0.0, time.monotonic(), 0
for epoch in range(6):
    for x in data:
        strategy.run(lambda: optimizer.apply_gradients([(np.resize(x.sum(0), w.shape) - w.numpy(), w)]))
        longest, last, steps = max(longest, time.monotonic() - last), time.monotonic(), steps + 1
        time.sleep(0.02)
        if steps == 15:
            open(f"FOLDER/{socket.gethostname()}-{strategy.rank}", "w").write(str(os.getpid()))
print("bits", hashlib.sha256(w.numpy().tobytes()).hexdigest(), steps, f"{longest:.1f}", flush=True)
"""


@pytest.mark.parametrize("pause", ["cut", "stop"])
def test_ranks_wait_and_go_on(mpi_run, hosts, tmp_path, pause):
    found = {}
    for name in ("undisturbed", pause):
        folder = tmp_path / name
        folder.mkdir()
        beside = threading.Thread(target=_PAUSES.get(name, lambda *args: None), args=(hosts, folder))
        beside.start()
        result = mpi_run(PROGRAM.replace("FOLDER", str(folder)), 4, timeout=60 + 2 * SECONDS, hosts=hosts)
        beside.join()
        assert result.returncode == 0, result
        found[name] = [line.split()[1:] for out in result.out for line in out.splitlines() if line.startswith("bits")]
        assert [words[1] for words in found[name]] == ["60"] * 4
        assert ("takes longer" in result.stderr) == (name != "undisturbed" and SECONDS > 15), result
    assert {words[0] for words in found["undisturbed"]} == {words[0] for words in found[pause]}
    assert max(float(words[2]) for words in found[pause]) > 0.9 * SECONDS  # there was a pause


def _when_they_run(folder):
    """Wait for the steps of all ranks; return the file of the last one."""
    while len(files := sorted(folder.iterdir())) < 4:
        time.sleep(0.01)
    return files[-1]


def _cut(hosts, folder):
    _when_they_run(folder)
    device = f"veth{len(hosts)}"
    hosts.inside("head", "ip", "link", "set", device, "down")
    try:
        time.sleep(SECONDS)
    finally:
        hosts.inside("head", "ip", "link", "set", device, "up")


def _stop(hosts, folder):
    path = _when_they_run(folder)
    kill = [*hosts.enter(path.name.split("-")[0]), "kill"]
    subprocess.run([*kill, "-STOP", path.read_text()], check=True, timeout=30)
    time.sleep(SECONDS)
    subprocess.run([*kill, "-CONT", path.read_text()], check=True, timeout=30)


_PAUSES = {"cut": _cut, "stop": _stop}
