"""Jobs that run the tests of others on ranks, and the lists of their results.

A job runs tests until one hangs, ends a rank, or ends in another way on some rank; the next job starts after that test. The ranks
agree through files, not through the backend under test.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

LIMIT = float(os.environ.get("PEERS_LIMIT", "60"))  # seconds of a test
SECOND = 4  # times as long it has where it took too long, for other programs may use the cores
KINDS = ("PASS", "FAIL", "SKIP")


class Ranks:
    """The ranks of a job, which tell each other through files what became of each test.

    Args:
        folder: a folder that all ranks see.
        rank, size: this rank's number, and the number of ranks.
    """

    def __init__(self, folder, rank, size):
        self.folder, self.rank, self.size = Path(folder), rank, size
        self.log = open(self.folder / f"log.{rank}", "a")  # noqa: SIM115
        self.timer = None

    def put(self, name, text=""):
        """Publish a text of this rank."""
        path = self.folder / f"test_{name}.{self.rank}"
        path.with_name(f"{path.name}~").write_text(text)
        path.with_name(f"{path.name}~").rename(path)

    def all(self, name, seconds=None):
        """Return the texts of all ranks, None where they do not come in SECONDS, by default a test's LIMIT."""
        paths = [self.folder / f"test_{name}.{rank}" for rank in range(self.size)]
        end = time.monotonic() + (LIMIT if seconds is None else seconds)
        while time.monotonic() < end:
            if all(path.exists() for path in paths):
                return [path.read_text() for path in paths]
            time.sleep(0.01)
        return None

    def begin(self, number, text=""):
        """Start a test's clock, and return what each rank says when all are here. A test that takes too long ends the job."""

        def hang():
            self.put(number, "HANG")
            faulthandler.dump_traceback(self.log)
            self.leave()

        self.timer = threading.Timer(LIMIT, hang)
        self.timer.daemon = True
        self.timer.start()
        # A call of C++ that keeps the interpreter's lock keeps the timer waiting, too.
        faulthandler.dump_traceback_later(LIMIT * 1.2, exit=True, file=self.log)
        self.put(f"{number}.start", text)
        return self.all(f"{number}.start")

    def end(self, number, result):
        """Publish a test's result. End the job unless all ranks have one of the same kind."""
        self.timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        self.put(number, result)
        found = self.all(number, LIMIT if result == "PASS" else 5.0)
        if found is None or len({text.split()[0] for text in found}) > 1:
            self.leave()

    def leave(self):
        """End this process at once."""
        self.log.flush()
        os._exit(3)


def let_gloo_be(backend):
    """Let groups of "gloo" be those of another backend, which shows itself as "gloo". Return the set of the backends used."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    helper, get_backend, used = distributed_c10d._new_process_group_helper, distributed_c10d.get_backend, set()

    def make(group_size, group_rank, ranks, name, *args, **kwargs):
        name = re.sub(r"\bgloo\b", backend, str(name))
        used.update(re.findall(r"\w+", name))
        return helper(group_size, group_rank, ranks, dist.Backend(name), *args, **kwargs)

    def shown(group=None):
        found = get_backend(group)
        return "gloo" if found == backend else found

    distributed_c10d._new_process_group_helper = make
    if backend != "gloo":
        distributed_c10d.get_backend = dist.get_backend = shown
    return used


def drive(folder, todo, command):
    """Start jobs until every test has a result, and return the results by test. Those in the folder are kept.

    A test that takes too long runs once more, SECOND times as long.

    Args:
        folder: a folder for the results; the ranks read the names of their tests from its todo.json.
        todo: the names of the tests.
        command: the words that start a job.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}

    def missing():
        return [name for name in todo if name not in results]

    start_jobs(folder, missing(), command, results, LIMIT)
    for name in todo:
        if "HANG" in results[name]:
            del results[name]
    start_jobs(folder, missing(), command, results, LIMIT * SECOND)
    return results


def start_jobs(folder, todo, command, results, limit):
    """Start jobs until every test has a result of at most LIMIT seconds, and write it to the results, also in the folder."""
    environment = {**os.environ, "PEERS_LIMIT": str(limit)}
    while todo:
        for path in folder.glob("test_*"):
            path.unlink()
        (folder / "todo.json").write_text(json.dumps(todo))
        with open(folder / "out", "a") as out:
            status = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False
            ).returncode
        found = collect(folder, todo) or {todo[0]: f"FAIL the job ended with {status} before the test"}
        results.update(found)
        todo = [name for name in todo if name not in found]
        (folder / "results.json").write_text(json.dumps(results, indent=0))


def collect(folder, todo):
    """Return the results of the tests that a job has run."""
    found = {}
    for number, test in enumerate(todo):
        ranks = range(len(list(folder.glob(f"test_{number}.start.*"))))
        if not ranks:
            continue
        paths = [folder / f"test_{number}.{rank}" for rank in ranks]
        texts = [path.read_text() if path.exists() else "FAIL ended" for path in paths]
        bad = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text.startswith(("FAIL", "HANG"))]
        others = [text for text in texts if text != "PASS"]
        found[test] = f"FAIL {'; '.join(bad)}" if bad else others[0] if others else "PASS"
    return found


def judge(results, path, key, write, whole=True):
    """Compare results with those of a list, or write them there. Return the number of differences.

    A list has the tests of each kind; under CAUSE a sentence for each that fails; and under EITHER one for each that passes or
    fails by chance, which is not compared. Persons write the sentences.

    Args:
        results: a text for each test, which begins with PASS, FAIL or SKIP.
        path: the file with the lists.
        key: the name of the list.
        write: whether to write.
        whole: whether a test of the list that has no result is a difference.
    """
    kinds = {name: text.split()[0] for name, text in sorted(results.items())}
    print(f"{key}: {dict(collections.Counter(kinds.values()))}")
    lists = json.loads(path.read_text()) if path.exists() else {}
    if write:
        known = lists.get(key, {}).get("CAUSE", {})
        either = lists.get(key, {}).get("EITHER", {})
        groups = {kind: [name for name, found in kinds.items() if found == kind] for kind in KINDS}
        causes = {name: known.get(name, results[name][:300]) for name in groups["FAIL"]}
        lists[key] = {kind: found for kind, found in (groups | {"CAUSE": causes, "EITHER": either}).items() if found}
        path.write_text(json.dumps(dict(sorted(lists.items())), indent=1) + "\n")
        return 0
    expected = {name: kind for kind in KINDS for name in lists.get(key, {}).get(kind, ())}
    expected |= {name: kinds.get(name) for name in lists.get(key, {}).get("EITHER", ())}
    wrong = [
        name for name in {**expected, **kinds} if expected.get(name) != kinds.get(name) and (whole or name in kinds)
    ]
    for name in wrong:
        print(f"{name}: expected {expected.get(name)}, got {results.get(name)}")
    return len(wrong)


def pytest_words(tests):
    """Return the words of pytest for tests of others: their folder is its root, and no folder above it configures it."""
    return ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tests)]


def absolute(text):
    """Return an absolute path, for an argument: PyTorch takes the first folder of `file://a/b` for a host."""
    return Path(text).resolve()


def beside(name):
    """Return a program of this Python's environment."""
    return str(Path(sys.executable).with_name(name))
