"""Fetch the suites that others wrote, run them on this package's backend, and compare the results with the lists.

    python -m tests.peers --output FOLDER [--repositories FOLDER] [SUITE …]

`make test-peers` calls it in an environment with their packages. A suite whose repository cannot be fetched is skipped, and the
reason is printed. The status is 1 if a result differs from the lists.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from . import suites

# name: its repository, the version that the list was made with, and its folder of tests
REPOSITORIES = {
    "horovod": ("https://github.com/horovod/horovod", "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a", "test"),
    "lightning": ("https://github.com/Lightning-AI/pytorch-lightning", "2.6.5", "tests"),
    "torch": ("https://github.com/pytorch/pytorch", "v2.13.0", "test/distributed"),
}
LIMIT = 600  # seconds of a fetch


def fetched(name, folder):
    """Return the folder of a suite's repository, which is fetched unless it is there.

    Raises:
        OSError: it cannot be fetched.
    """
    url, version, tests = REPOSITORIES[name]
    path = folder / name
    if path.exists():
        return path
    part = path.with_name(f"{name}~")
    git = ["git", "-C", str(part)]
    try:
        for words in (
            ["git", "init", "-q", str(part)],
            [*git, "remote", "add", "origin", url],
            [*git, "sparse-checkout", "set", tests],
            [*git, "fetch", "-q", "--depth", "1", "--filter=blob:none", "origin", version],
            [*git, "checkout", "-q", "FETCH_HEAD"],
        ):
            subprocess.run(
                words,
                env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
                timeout=LIMIT,
                check=True,
                capture_output=True,
                text=True,
            )
    except (subprocess.SubprocessError, OSError) as error:
        subprocess.run(["rm", "-rf", str(part)], check=False)
        text = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise OSError(f"{url} cannot be fetched: {text}") from None
    return part.rename(path)


def jobs(repositories):
    """Yield the name of each suite, and its words after `python -m`, or the reason why it cannot run."""
    for ranks in (2, 4):
        yield f"torch.distributed on {ranks} ranks", ["tests.peers.torch_distributed", "--ranks", str(ranks)]
    for key in json.loads((Path(__file__).with_name("horovod.json")).read_text()):
        ranks = key.split()[0]
        try:
            folder = fetched("horovod", repositories)
            yield f"horovod on {ranks} ranks", ["tests.peers.horovod", "--repository", str(folder), "--ranks", ranks]
        except OSError as error:
            yield f"horovod on {ranks} ranks", str(error)
    for key in json.loads(suites.EXPECTED.read_text()):
        name, _, ranks = key.removesuffix(" ranks").partition(" on ")
        try:
            folder = (
                scripts_of_accelerate() if name == "accelerate" else fetched(name, repositories) / REPOSITORIES[name][2]
            )
            yield key, ["tests.peers.suites", name, "--tests", str(folder), "--ranks", ranks]
        except OSError as error:
            yield key, str(error)


def scripts_of_accelerate():
    """Return the folder of Accelerate's scripts.

    Raises:
        OSError: Accelerate is not installed.
    """
    found = importlib.util.find_spec("accelerate")
    if found is None or found.origin is None:
        raise OSError("Accelerate is not installed")
    return Path(found.origin).parent / "test_utils/scripts"


def main():
    """Run the suites."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="the first word of a suite's name; default all")
    parser.add_argument("--output", required=True, help="a folder for the results, which are made anew")
    parser.add_argument("--repositories", help="a folder with, or for, their repositories; default OUTPUT/repositories")
    arguments = parser.parse_args()
    output, wrong = Path(arguments.output), []
    repositories = Path(arguments.repositories or output / "repositories")
    repositories.mkdir(parents=True, exist_ok=True)
    for name, words in jobs(repositories):
        if arguments.suites and name.split()[0] not in arguments.suites:
            continue
        if isinstance(words, str):
            print(f"{name}: skipped, for {words}", flush=True)
            continue
        folder = output / name.replace(" ", "_")
        subprocess.run(["rm", "-rf", str(folder)], check=False)
        print(f"{name}: {' '.join(words)}", flush=True)
        if subprocess.run([sys.executable, "-m", *words, "--output", str(folder)], check=False).returncode:
            wrong.append(name)
    if wrong:
        print(f"other results than in the lists: {', '.join(wrong)}; see {output}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
