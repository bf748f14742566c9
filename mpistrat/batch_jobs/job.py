"""`BatchJob`: a program and the resources that it needs, validated on construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ..base.environment import STRATEGIES
from ..base.errors import explain
from .checks import check_fit, chosen, matching, text, whole

__all__ = ["Array", "BatchJob", "Preemption"]

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,63}"
_MOST_TEXT = 1 << 16  # characters of a program with its arguments; operating systems accept a few times as many


@final
@dataclass(frozen=True)
class Array:
    """The tasks of a job array. The program receives its index and its folder as arguments.

    Args:
        indices: "0-9", or "0-9%2" for two at a time.
        index_argument: the program gets `--<index_argument> INDEX`.
        output_argument: the program gets `--<output_argument> <output_folder>/INDEX`.
        output_folder: the parent of the tasks' folders.

    Raises:
        ValueError: with the name of the wrong argument.
    """

    indices: str
    index_argument: str
    output_argument: str
    output_folder: str

    def __post_init__(self) -> None:
        expected = "FIRST-LAST or FIRST-LAST%AT_ONCE, for instance 0-9%2"
        matching("Array", "indices", self.indices, r"\d{1,6}-\d{1,6}(%[1-9]\d{0,5})?", expected)
        if self.last < self.first:
            raise ValueError(f"Array: indices: expected a last index of at least the first, got {self.indices!r}")
        for name in ("index_argument", "output_argument"):
            expected = "the name of an argument of your program, without the dashes before it"
            matching("Array", name, getattr(self, name), r"[A-Za-z][A-Za-z0-9_-]{0,63}", expected)
        text("Array", "output_folder", self.output_folder, path=True)

    @property
    def first(self) -> int:
        """The first index."""
        return int(self.indices.split("-")[0])

    @property
    def last(self) -> int:
        """The last index."""
        return int(self.indices.split("-")[1].split("%")[0])


@final
@dataclass(frozen=True)
class Preemption:
    """Preemption of a job: it gets a signal before its end, saves, and resumes once it is requeued.

    Args:
        notice: seconds before the time limit at which the ranks get SIGUSR1.
        max_restarts: the most times that the job is requeued.

    Raises:
        ValueError: with the name of the wrong argument.
    """

    notice: int = 120
    max_restarts: int = 10

    def __post_init__(self) -> None:
        whole("Preemption", "notice", self.notice, 1, 65535)
        whole("Preemption", "max_restarts", self.max_restarts, 1, 1000)


@final
@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A program, its strategy, and the nodes, ranks and time that it needs.

    Args:
        program: the program and its arguments, one string each. A program that ends in .py is run by Python.
        module: the program is the name of a Python module, as after `python -m`.
        check: the program is a command of mpistrat that starts the job's ranks itself. It runs in the batch script and gets the
            launcher's command line after its own arguments.
        numbers: set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for each rank before the program starts, as torchrun does.
        name: of the job and of its log.
        nodes, ranks_per_node: with `ps_nodes`, those of the workers.
        cpus_per_rank: cores, and threads, of each rank.
        gpus_per_node: 0 for none. A single rank of a node uses all of them. Several ranks take one each, unless the program names
            its devices.
        gpu_mpi: let MPI handle GPU memory. Only programs that pass such arrays to MPI need it; with NCCL this package does not.
        memory: of each node, for instance "64G"; "" for the site's default.
        time: the limit, as [DAYS-]HOURS:MINUTES:SECONDS.
        strategy: one_device, mirrored, multi_worker_mirrored, central_storage or parameter_server.
        num_ps: parameter servers, the last of the ranks.
        ps_nodes: nodes for the servers alone, as the second component of a heterogeneous job; 0: the servers are among
            `nodes * ranks_per_node`.
        container: image to run in; "" for none.
        stage: folder on each node, in memory or on its own disk, into which the virtual environment is copied before the ranks
            start; "" for none.
        array, preemption: for an array of jobs, and for a job that may be preempted.
        restarts: the most times that the ranks are restarted within the job after a rank dies or a node is lost.
        survive: programs of `ms.survive` continue without a restart; Open MPI.
        partition, account, qos: of the batch system; "" for its default.
        mail: address for a message at the end of the job.

    Raises:
        ValueError: with the name of the wrong argument.
        LayoutError: the strategy does not fit the ranks; with those that do.

    Example:
        >>> BatchJob(program=("train.py", "--epochs", "10"), nodes=4, ranks_per_node=4).ranks
        16
    """

    program: tuple[str, ...]
    module: bool = False
    check: bool = False
    numbers: bool = False
    name: str = "mpistrat"
    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_rank: int = 1
    gpus_per_node: int = 0
    gpu_mpi: bool = False
    memory: str = ""
    time: str = "01:00:00"
    strategy: str = "multi_worker_mirrored"
    num_ps: int = 0
    ps_nodes: int = 0
    container: str = ""
    stage: str = ""
    array: Array | None = None
    preemption: Preemption | None = None
    restarts: int = 0
    survive: bool = False
    partition: str = ""
    account: str = ""
    qos: str = ""
    mail: str = ""

    def __post_init__(self) -> None:
        self._check_program()
        matching("Job", "name", self.name, _NAME, "letters, digits and . _ + @ -, at most 64")
        whole("Job", "nodes", self.nodes, 1, 100_000)
        whole("Job", "ranks_per_node", self.ranks_per_node, 1, 4096)
        whole("Job", "cpus_per_rank", self.cpus_per_rank, 1, 4096)
        whole("Job", "gpus_per_node", self.gpus_per_node, 0, 64)
        whole("Job", "num_ps", self.num_ps, 0, 100_000)
        whole("Job", "ps_nodes", self.ps_nodes, 0, 100_000)
        whole("Job", "restarts", self.restarts, 0, 1000)
        if self.memory:
            matching("Job", "memory", self.memory, r"[1-9]\d{0,8}[MGT]", "a number with M, G or T, as in 64G")
        matching("Job", "time", self.time, r"(\d{1,3}-)?\d{1,4}:[0-5]\d:[0-5]\d", "[DAYS-]HOURS:MINUTES:SECONDS")
        if not self.seconds:
            raise ValueError(f"Job: time: expected a positive duration, got {self.time!r}")
        for name in ("partition", "account", "qos"):
            if getattr(self, name):
                matching("Job", name, getattr(self, name), _NAME, "letters, digits and . _ + @ -, at most 64")
        if self.mail:
            matching(
                "Job", "mail", self.mail, r"[A-Za-z0-9_][\w.+-]{0,99}@[A-Za-z0-9][A-Za-z0-9.-]{0,99}", "an address"
            )
        if self.container:
            text("Job", "container", self.container, path=True)
        if self.stage:
            expected = "an absolute path of letters, digits and . _ / -, as /tmp or /dev/shm"
            matching("Job", "stage", self.stage, r"/[A-Za-z0-9_./-]{1,200}", expected)
        if self.preemption and self.preemption.notice >= self.seconds:
            expected, got = f"less than the time limit, {self.seconds} seconds", self.preemption.notice
            raise ValueError(explain("Job", "preemption", expected=f"a notice of {expected}", got=got))
        chosen("Job", "strategy", self.strategy, STRATEGIES)
        check_fit(self.strategy, self.nodes, self.ranks_per_node, self.num_ps, self.ps_nodes)

    def _check_program(self) -> None:
        if not isinstance(self.program, tuple) or not self.program:
            raise ValueError(f"Job: program: expected a program and its arguments, got {self.program!r:.80}")
        text("Job", "program", self.program[0])
        if self.module:
            matching("Job", "program", self.program[0], r"[A-Za-z_]\w*(\.\w+)*", "the name of a Python module")
        for word in self.program[1:]:
            text("Job", "an argument of the program", word, dash=True)
        length = sum(map(len, self.program))
        if length > _MOST_TEXT:
            raise ValueError(f"Job: program: expected at most {_MOST_TEXT} characters with all arguments, got {length}")
        if ":" in self.program:  # it separates the programs of an MPMD launch
            got = f"{self.program!r:.80}"
            raise ValueError(
                f"Job: program: expected no argument ':', got {got}. mpiexec and srun end the program there"
            )

    @property
    def seconds(self) -> int:
        """The time limit in seconds."""
        days, _, clock = self.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def ranks(self) -> int:
        """The number of ranks, parameter servers included."""
        return self.nodes * self.ranks_per_node + (self.num_ps if self.ps_nodes else 0)
