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
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from . import suites
from .jobs import absolute

# name: its repository, the version that the list was made with, and its folders: the tests, and what they need
REPOSITORIES = {
    "horovod": (
        "https://github.com/horovod/horovod",
        "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a",
        "test examples/pytorch",
    ),
    "lightning": ("https://github.com/Lightning-AI/pytorch-lightning", "2.6.5", "tests"),
    "torch": ("https://github.com/pytorch/pytorch", "v2.6.0", "test/distributed"),
    "transformers": ("https://github.com/huggingface/transformers", "v5.15.0", "tests utils src/transformers"),
}
# name: Debian's source package with the same files, for machines whose apt has a line for sources
PACKAGES = {"torch": "pytorch=2.6.0+dfsg-7"}
LIMIT = 600  # seconds of a fetch


def fetched(name, folder):
    """Return the folder of a suite's repository, which is fetched unless it is there: by git, else from Debian's source package.

    Raises:
        OSError: it cannot be fetched.
    """
    path = folder / name
    if path.exists():
        return path
    part = path.with_name(f"{name}~")
    reasons = []
    for way in (by_git, by_apt):
        try:
            way(name, part)
            return part.rename(path)
        except (subprocess.SubprocessError, OSError, LookupError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            reasons += lines[-1:]
        finally:
            shutil.rmtree(part, ignore_errors=True)
    raise OSError(f"{REPOSITORIES[name][0]} cannot be fetched: {'; '.join(reasons)}")


def by_git(name, part):
    """Fetch the tests of a suite's repository into a folder."""
    url, version, tests = REPOSITORIES[name]
    git = ["git", "-C", str(part)]
    for words in (
        ["git", "init", "-q", str(part)],
        [*git, "remote", "add", "origin", url],
        [*git, "sparse-checkout", "set", *tests.split()],
        [*git, "fetch", "-q", "--depth", "1", "--filter=blob:none", "origin", version],
        [*git, "checkout", "-q", "FETCH_HEAD"],
    ):
        run(words, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})


def by_apt(name, part):
    """Take the tests of a suite from the source package of Debian into a folder."""
    if name not in PACKAGES:
        raise LookupError("Debian has no source package of it")
    part.mkdir()
    run(["apt-get", "source", "-qq", "--download-only", "--only-source", PACKAGES[name]], cwd=part)
    unpack(next(part.glob("*.orig.tar.*")), REPOSITORIES[name][2], part)


def unpack(archive, tests, part):
    """Extract the folder of tests of an archive, without the archive's own first folder."""
    with tarfile.open(archive) as found:
        for member in found:
            _, _, member.name = member.name.partition("/")
            if member.isfile() and member.name.startswith(f"{tests}/"):
                found.extract(member, part, filter="data")


def run(words, **options):
    """Run a program, for at most LIMIT seconds."""
    subprocess.run(words, timeout=LIMIT, check=True, capture_output=True, text=True, **options)


def jobs():
    """Yield for each run its name, its words after `python -m`, and the repository that it needs, or None."""
    for ranks in ("2", "4"):
        yield f"torch.distributed on {ranks} ranks", ["torch_distributed", "--ranks", ranks], None
    # On 2 ranks the tests of a group of ranks 1 and 2 fail.
    words = ["torch_distributed", "--ranks", "4", "--backend", "mpi", "--match", "all_to_all"]
    yield "torch.mpi on 4 ranks", words, None
    for key in json.loads(Path(__file__).with_name("horovod.json").read_text()):
        yield f"horovod on {key}", ["horovod", "--ranks", key.split()[0], "--repository"], "horovod"
    for key in json.loads(suites.EXPECTED.read_text()):
        name, _, ranks = key.removesuffix(" ranks").partition(" on ")
        yield key, ["suites", name, "--ranks", ranks, "--tests"], name


def folder_of(name, repositories):
    """Return the folder that a run needs: a repository, its tests, or Accelerate's scripts, which come with its wheel.

    Raises:
        OSError: it is not to be had.
    """
    if name == "horovod":
        return fetched(name, repositories)
    if name != "accelerate":
        return fetched(name, repositories) / REPOSITORIES[name][2].split()[0]
    found = importlib.util.find_spec("accelerate")
    if found is None or found.origin is None:
        raise OSError("Accelerate is not installed")
    return Path(found.origin).parent / "test_utils/scripts"


def main():
    """Run the suites."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="the first word of a suite's name; default all")
    parser.add_argument("--output", type=absolute, required=True, help="a folder for the results, which are made anew")
    parser.add_argument(
        "--repositories", type=absolute, help="a folder with, or for, their repositories; default OUTPUT/repositories"
    )
    arguments = parser.parse_args()
    output, wrong = arguments.output, []
    repositories = arguments.repositories or output / "repositories"
    repositories.mkdir(parents=True, exist_ok=True)
    for name, words, needed in jobs():
        if arguments.suites and name.split()[0] not in arguments.suites:
            continue
        try:
            words += [str(folder_of(needed, repositories))] if needed else []
        except OSError as error:
            print(f"{name}: skipped, for {error}", flush=True)
            continue
        results = output / name.replace(" ", "_")
        shutil.rmtree(results, ignore_errors=True)
        print(f"{name}: {' '.join(words)}", flush=True)
        command = [sys.executable, "-m", f"{__package__}.{words[0]}", *words[1:], "--output", str(results)]
        if subprocess.run(command, check=False).returncode:
            wrong.append(name)
    if wrong:
        print(f"other results than in the lists: {', '.join(wrong)}; see {output}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
