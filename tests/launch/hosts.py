"""Isolated hosts on one Linux machine: ranks on one host share memory, ranks on two talk TCP, as on real machines.

A host is a process with network, host name, processes, System V IPC, mounts and a /dev/shm of its own. (Network namespaces
alone are not enough: MPICH's UCX then still sees one machine.) The hosts hang on a bridge inside one more network namespace,
"head", where mpiexec runs: nothing is added to this machine's network, so runs do not collide, and all of it is gone when
its processes are.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.launch.launcher import end_with_parent

if TYPE_CHECKING:
    import pytest

    from tests.launch.launcher import MpiEnv

NETWORK = "10.213.77"
SHARED = "mpistrat_hosts"
AGENT = """#!/bin/sh
# What mpiexec calls in place of ssh: agent [-options] HOST COMMAND...
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
# A /tmp of each host's own: Open MPI's daemons name their folders by process number, which two hosts may both have.
export TMPDIR="${{TMPDIR:-/tmp}}/$host"; mkdir -p "$TMPDIR"
exec nsenter --target "$(cat {folder}/$host.pid)" --net --uts --ipc --mount --pid -- sh -c "$*"
"""


@functools.cache
def why_no_hosts() -> str:
    """The reason why this machine cannot have isolated hosts; empty where it can."""
    if not Path("/proc/self/ns/net").exists():
        return "isolated hosts need Linux namespaces"
    if os.geteuid() != 0:
        return "isolated hosts need root"
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]:
        return f"isolated hosts need {', '.join(missing)} (iproute2, util-linux)"
    trial = "ip link add trial type bridge && mount -t tmpfs trial /dev/shm"
    command = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "sh", "-c", trial]
    reply = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return f"this machine allows no isolated hosts: {reply.stderr.strip()}" if reply.returncode else ""


class Hosts:
    """`count` isolated hosts, h1, h2, …; `close()` ends them."""

    def __init__(self, count: int) -> None:
        self.names = [f"h{i}" for i in range(1, count + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix="mpistrat-hosts-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        lines = ["127.0.0.1 localhost", f"{NETWORK}.254 head"]
        lines += [f"{NETWORK}.{i} {name}" for i, name in enumerate(self.names, 1)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "agent").write_text(AGENT.format(folder=self.folder))
        (self.folder / "agent").chmod(0o755)
        try:
            self._head = self._start("head", "--net", "--uts", "--mount")
            self.inside("head", "ip", "link", "add", "bridge0", "type", "bridge")
            self.inside("head", "ip", "addr", "add", f"{NETWORK}.254/24", "dev", "bridge0")
            self.inside("head", "ip", "link", "set", "bridge0", "up")
            for i, name in enumerate(self.names, 1):
                self._add_host(i, name)
            self._wait_for_links()
        except BaseException:
            self.close()
            raise

    @classmethod
    def shared(cls, config: pytest.Config, count: int) -> Hosts:
        """The hosts of this pytest run, made at the first call."""
        made = config.__dict__.setdefault(SHARED, {})
        if count not in made:
            made[count] = cls(count)
            config.add_cleanup(made[count].close)
        return made[count]

    def __len__(self) -> int:
        return len(self.names)

    def mpiexec(self, mpi: MpiEnv, ranks: int) -> list[str]:
        """The words that start `ranks` ranks, as many on each host, of what follows them."""
        if ranks % len(self):
            raise ValueError(f"{ranks} ranks cannot be spread evenly over {len(self)} hosts")
        slots = ",".join(f"{name}:{ranks // len(self)}" for name in self.names)
        agent = str(self.folder / "agent")
        if "Open MPI" in mpi.vendor:
            over = ["--prtemca", "plm_ssh_agent", agent, "--host", slots]
        else:
            over = ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", slots]
        return [*self.enter("head"), *mpi.mpiexec, *mpi.flags, *over, "-n", str(ranks)]

    def inside(self, host: str, *command: str) -> str:
        """Run a command on one host (or on "head") and return what it wrote."""
        reply = subprocess.run([*self.enter(host), *command], capture_output=True, text=True, timeout=30)
        if reply.returncode:
            raise RuntimeError(f"{' '.join(command)} on {host}: {reply.stderr.strip()}")
        return reply.stdout

    def close(self) -> None:
        """End all hosts and what runs on them."""
        for process in reversed(self._processes):
            process.kill()
            process.wait(10)
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def enter(self, host: str, cwd: str | os.PathLike[str] | None = None) -> list[str]:
        """The words that run what follows them on one host (or on "head"), in a folder (default: this process's)."""
        kinds = ["--net", "--uts", "--mount", *(["--ipc", "--pid"] if host != "head" else [])]
        where = os.getcwd() if cwd is None else os.fspath(cwd)
        return ["nsenter", "--target", (self.folder / f"{host}.pid").read_text(), *kinds, "env", "-C", where]

    def _start(self, name: str, *kinds: str) -> int:
        """A process in namespaces of its own; it ends with this one, whatever ends this one."""
        ready = self.folder / f"{name}.ready"
        setup = f"hostname {name}; mount --bind {self.folder}/hosts /etc/hosts; ip link set lo up; touch {ready}"
        stay = "exec sleep infinity"
        if "--pid" in kinds:  # then the shell is the host's first process: it must reap, and its end ends all others
            setup = f"mount -t proc proc /proc; mount -t tmpfs shm /dev/shm; {setup}"
            stay = "sleep infinity & wait"
        process = subprocess.Popen(
            ["unshare", *kinds, "--fork", "--kill-child", "sh", "-c", f"{setup}; {stay}"],
            stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent(signal.SIGKILL),
        )  # fmt: skip
        self._processes.append(process)
        until = time.monotonic() + 20
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"host {name} did not start")
            time.sleep(0.02)
        pid = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
        (self.folder / f"{name}.pid").write_text(pid)
        return int(pid)

    def _add_host(self, number: int, name: str) -> None:
        pid = self._start(name, "--net", "--uts", "--ipc", "--mount", "--pid")
        self.inside(
            "head", "ip", "link", "add", f"veth{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid)
        )
        self.inside("head", "ip", "link", "set", f"veth{number}", "master", "bridge0", "up")
        self.inside(name, "ip", "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        self.inside(name, "ip", "link", "set", "eth0", "up")

    def _wait_for_links(self) -> None:
        """The kernel reports a new link as up a moment later; Open MPI's daemon gives up where it finds none."""
        until = time.monotonic() + 20
        for host, device in [("head", "bridge0"), *((name, "eth0") for name in self.names)]:
            while "state UP" not in self.inside(host, "ip", "-o", "link", "show", device):
                if time.monotonic() > until:
                    raise RuntimeError(f"{device} of host {host} does not come up")
                time.sleep(0.02)
