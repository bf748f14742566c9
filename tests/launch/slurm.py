"""A real SLURM over isolated hosts: munge, slurmctld on "head" and one slurmd a host, from a folder of its own.

Nothing of this machine's own SLURM or munge is read or touched, two of these run beside each other, and all processes end with
this one. Jobs run on the two hosts of `hosts.py`; `srun` and `sbatch` are run on "head", which holds no compute node.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.launch.hosts import NETWORK, Hosts, why_no_hosts
from tests.launch.launcher import ROOT, end_with_parent

if TYPE_CHECKING:
    import pytest

    from tests.launch.launcher import MpiEnv

SHARED = "mpistrat_slurm"
COMMANDS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "sinfo")
CPUS = 4
# TmpFS: two slurmds on one machine would share their PMIx sockets. cred_expire: so long a requeued job waits (else two minutes).
# SchedulerParameters: look for work more often than on a busy cluster. Hosts have more CPUs here than this machine has cores:
# nothing is bound to them.
CONF = """\
ClusterName=test
SlurmctldHost=head({network}.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=15
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/task_prolog
SlurmdParameters=config_overrides
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/tmp.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2,sched_min_interval=0
KillWait=5
GresTypes=gpu
NodeName={nodes} CPUs={cpus} Gres=gpu:{gpus} RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10
"""
# Open MPI's daemons name their folders by process number, which two hosts may both have.
TASK_PROLOG = (
    '#!/bin/sh\nmkdir -p "{folder}/tmp.$SLURMD_NODENAME"; echo "export TMPDIR={folder}/tmp.$SLURMD_NODENAME"\n'
)
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "OUT_OF_MEMORY",
    "DEADLINE",
)


@functools.cache
def why_no_slurm() -> str:
    """The reason why no SLURM can be started here; empty where one can."""
    if reason := why_no_hosts():
        return reason
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        return f"a SLURM needs {', '.join(missing)} (Debian: slurm-wlm munge libpmix-dev)"
    return ""


@dataclass
class Reply:
    """What a command on "head" did."""

    returncode: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit status {self.returncode}\n---- stdout\n{self.out[-6000:]}\n---- stderr\n{self.err[-6000:]}"


class Slurm:
    """A SLURM over `hosts`, each with so many CPUs and GPUs as far as SLURM counts them; `close()` ends it."""

    def __init__(self, hosts: Hosts, cpus: int = CPUS, gpus: int = 0) -> None:
        self.hosts, self.folder = hosts, hosts.folder / "slurm"
        self._processes: list[subprocess.Popen[bytes]] = []
        for name in ("state", *hosts.names, *(f"tmp.{host}" for host in hosts.names)):
            (self.folder / name).mkdir(parents=True)
        words = {"folder": self.folder, "network": NETWORK, "nodes": ",".join(hosts.names)}
        words |= {"cpus": cpus, "gpus": gpus}
        self._write("slurm.conf", CONF.format(**words))
        for i in range(gpus):  # any file is a device to SLURM
            self._write(f"gpu{i}", "")
        self._write("gres.conf", f"Name=gpu File={self.folder}/gpu[0-{gpus - 1}]\n" if gpus else "")
        self._write("cgroup.conf", "CgroupPlugin=cgroup/v1\n")  # the other one asks systemd at once
        self._write("task_prolog", TASK_PROLOG.format(**words)).chmod(0o755)
        try:
            self._start_munge()
            self._start("slurmctld", [*hosts.enter("head"), "slurmctld", "-D"])
            for host in hosts.names:
                self._start(f"slurmd.{host}", [*hosts.enter(host), "slurmd", "-D", "-N", host])
            self._wait_for_nodes()
        except BaseException:
            self.close()
            raise

    @classmethod
    def shared(cls, config: pytest.Config) -> Slurm:
        """The SLURM of this pytest run, made at the first call, over its two isolated hosts."""
        if SHARED not in config.__dict__:
            config.__dict__[SHARED] = cls(Hosts.shared(config, 2))
            config.add_cleanup(config.__dict__[SHARED].close)
        return config.__dict__[SHARED]

    def run(
        self,
        *command: str,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        timeout: float = 120.0,
    ) -> Reply:
        """Run a command on "head", where `srun`, `sbatch` and the others find this SLURM. A late one is ended, and an error."""
        words = [*self.hosts.enter("head", cwd), *command]
        process = subprocess.Popen(
            words, env=self.environment(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True, preexec_fn=end_with_parent(signal.SIGTERM),
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            queue = self.report()
            os.killpg(process.pid, signal.SIGTERM)
            with_grace = _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise AssertionError(f"{' '.join(command)} took more than {timeout:g} s\n{with_grace}\n{queue}") from None
        return Reply(process.returncode, out, err)

    def ok(self, *command: str, **options: object) -> str:
        """`run`, for a command that must succeed; what it wrote to stdout."""
        reply = self.run(*command, **options)  # type: ignore[arg-type]
        assert reply.returncode == 0, f"{' '.join(command)}: {reply}\n{self.report()}"
        return reply.out

    def environment(self, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """What a user of this cluster has, and one BLAS thread a rank; then `extra`."""
        wanted: dict[str, str | None] = {
            "SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1", "OMPI_MCA_osc": "^ucx", "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # as mpirun sets it itself where ranks share cores; srun does not
            **(extra or {}),
        }  # fmt: skip
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {name: value for name, value in {**kept, **wanted}.items() if value is not None}

    @functools.cached_property
    def why_no_pmix(self) -> str:
        """The reason why this SLURM starts no ranks by PMIx; empty where it does."""
        plugins = self.run("srun", "--mpi=list")
        library = any(Path("/usr").glob("lib*/libpmix.so")) or any(Path("/usr/lib").glob("*/libpmix.so"))
        if "pmix" in plugins.out + plugins.err and library:
            return ""
        return "srun --mpi=pmix needs SLURM's plugin for PMIx and libpmix.so (Debian: libpmix-dev)"

    def tasks(
        self, program: str | Sequence[str], *options: str, mpi: MpiEnv | None = None, timeout: float = 120.0
    ) -> list[str]:
        """Run a Python program by `srun` on as many tasks as the options say; what each wrote to stdout, by SLURM_PROCID.

        With an MPI, its Python and the `--mpi=` that starts its ranks; else the Python of the tests.
        """
        words = [program] if isinstance(program, str) else list(program)
        start = ["srun", "--label", "--kill-on-bad-exit=1"] + ([f"--mpi={mpi_type(mpi)}"] if mpi else [])
        python = mpi.python if mpi else sys.executable
        words = [python, *(["-c"] if isinstance(program, str) else []), *words]
        out = self.ok(*start, *options, *words, timeout=timeout, env=exported(mpi))
        return by_task(out)

    def submit(self, script: Path, *options: str, env: Mapping[str, str | None] | None = None) -> Job:
        """`sbatch` a script, in its own folder, with its output beside it unless it says where."""
        words = ["sbatch", "--parsable", *options, str(script)]
        return Job(self, self.ok(*words, env=env, cwd=script.parent).split(";")[0].strip(), script.parent)

    @contextlib.contextmanager
    def configured(self, *lines: str) -> Iterator[None]:
        """These lines more in slurm.conf, for a while."""
        before = (self.folder / "slurm.conf").read_text()
        try:
            self._write("slurm.conf", before + "\n".join(lines) + "\n")
            self.ok("scontrol", "reconfigure")
            yield
        finally:
            self._write("slurm.conf", before)
            self.ok("scontrol", "reconfigure")

    def report(self, jobid: str = "") -> str:
        """The queue, the job if one is named, and the ends of the daemons' logs."""
        commands = [["squeue", "--all"], ["sinfo", "-N", "-l"]]
        commands += [["scontrol", "show", "job", jobid]] if jobid else []
        pieces = []
        for command in commands:
            reply = subprocess.run(
                [*self.hosts.enter("head"), *command],
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=30,
            )
            pieces.append(f"---- {' '.join(command)}\n{reply.stdout}{reply.stderr}")
        for log in sorted(self.folder.glob("*.log")):
            pieces.append(f"---- {log.name}\n{log.read_text(errors='replace')[-2500:]}")
        return "\n".join(pieces)

    def close(self) -> None:
        """End the daemons, in the order of their starts turned round: no slurmctld is told that its nodes are gone."""
        for process in [*self._processes[1:], *self._processes[:1]]:
            process.kill()
            process.wait(10)
        self._processes.clear()

    def _write(self, name: str, text: str) -> Path:
        new = self.folder / f"{name}.new"
        new.write_text(text)
        return new.replace(self.folder / name)  # daemons read it at any time, and end if it is empty

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.out", "w") as out:
            process = subprocess.Popen(
                command, env=self.environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=end_with_parent(signal.SIGKILL),
            )  # fmt: skip
        self._processes.append(process)
        return process

    def _start_munge(self) -> None:
        """One munge with a key of its own: its socket is a file, which the hosts share."""
        folder = self.folder
        subprocess.run(["mungekey", "--create", f"--keyfile={folder}/munge.key"], check=True, timeout=30)
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "seed", "log")]
        # --force: the folder above is other users', too (/tmp).
        self._start("munged", ["munged", "--foreground", "--force", f"--socket={folder}/munge", *files])
        self._wait("munge's socket", (folder / "munge").exists)

    def _wait_for_nodes(self) -> None:
        def idle() -> bool:
            reply = self.run("sinfo", "-h", "-p", "main", "-N", "-o", "%t")
            return reply.out.split() == ["idle"] * len(self.hosts)

        self._wait("idle nodes", idle)

    def _wait(self, what: str, there: object, patience: float = 30.0) -> None:
        until = time.monotonic() + patience
        while not there():  # type: ignore[operator]
            if time.monotonic() > until or any(process.poll() is not None for process in self._processes):
                texts = [f"---- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.out"))]
                raise RuntimeError(f"SLURM does not start: no {what}\n" + "\n".join(texts))
            time.sleep(0.05)


class Job:
    """A batch job."""

    def __init__(self, slurm: Slurm, number: str, folder: Path) -> None:
        self.slurm, self.number, self.folder = slurm, number, folder

    def fields(self) -> dict[str, str]:
        """What `scontrol show job` says, by name; of an array or a heterogeneous job the first part."""
        text = self.slurm.ok("scontrol", "--oneliner", "show", "job", self.number).splitlines()[0]
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def states(self) -> list[str]:
        """The states of all parts: one, or one for each task of an array and each part of a heterogeneous job."""
        lines = self.slurm.ok("scontrol", "--oneliner", "show", "job", self.number).splitlines()
        return [line.split("JobState=")[1].split()[0] for line in lines if "JobState=" in line]

    def wait(self, timeout: float = 150.0) -> list[str]:
        """Wait for the end of all parts, and return their states."""
        self.wait_until(f"the end of job {self.number}", lambda: all(s in ENDED for s in self.states()), timeout)
        return self.states()

    def completed(self, timeout: float = 150.0) -> str:
        """Wait for the end, which must be a good one, and return what the job wrote."""
        states = self.wait(timeout)
        assert set(states) == {"COMPLETED"}, self.tell(f"job {self.number} is {states}")
        return self.output()

    def wait_until(self, what: str, there: object, timeout: float = 120.0) -> None:
        """Wait until `there()` is true; show everything where it is not in time."""
        until = time.monotonic() + timeout
        while not there():  # type: ignore[operator]
            if time.monotonic() > until:
                text = self.tell(f"no {what} within {timeout:g} s")
                self.slurm.run("scancel", "--full", "--signal=KILL", self.number)
                raise AssertionError(text)
            time.sleep(0.3)

    def output(self) -> str:
        """What its scripts wrote, all parts one after the other."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.out")))

    def tell(self, what: str) -> str:
        """`what`, the job's output, and SLURM's view of things."""
        return f"{what}\n---- output\n{self.output()[-8000:]}\n{self.slurm.report(self.number.split('_')[0])}"


def by_task(labelled: str) -> list[str]:
    """What `srun --label` wrote, task by task."""
    texts: dict[int, str] = {}
    for line in labelled.splitlines():
        task, _, text = line.partition(":")
        texts[int(task)] = texts.get(int(task), "") + text.removeprefix(" ") + "\n"
    return [texts[task] for task in sorted(texts)]


def mpi_type(mpi: MpiEnv) -> str:
    """The value of `srun --mpi=` that starts ranks of this MPI."""
    return "pmix" if "Open MPI" in mpi.vendor else "pmi2"


def exported(mpi: MpiEnv | None) -> dict[str, str | None]:
    """What docs/troubleshooting.md and `mpistrat doctor` tell users to export before an srun of their own."""
    return {"MPIR_CVAR_CH4_NETMOD": "ofi"} if mpi is not None and mpi_type(mpi) == "pmi2" else {}


def _end(process: subprocess.Popen[str]) -> Reply:
    try:
        out, err = process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return Reply(process.returncode, out, err)
