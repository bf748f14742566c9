"""Compatibility of a job and a site's batch system. A request that the system cannot express is an error, never ignored."""

from __future__ import annotations

from ..base.errors import explain
from .job import BatchJob
from .schedulers import SCHEDULERS
from .site import SiteProfile

__all__ = ["check", "gpus_per_rank", "launcher_of"]


def launcher_of(site: SiteProfile) -> str:
    """Return the launcher that starts the ranks, without `mpistrat run` before it."""
    return SCHEDULERS[site.scheduler].launchers[0] if site.launcher == "auto" else site.launcher


def gpus_per_rank(job: BatchJob) -> int:
    """Return the number of GPUs of each rank."""
    return job.gpus_per_node // job.ranks_per_node


def check(job: BatchJob, site: SiteProfile) -> None:
    """Raise unless the site's batch system supports everything that the job requests.

    Raises:
        ValueError: with the request that it does not support.
    """
    scheduler, launcher = SCHEDULERS[site.scheduler], launcher_of(site)
    if launcher not in scheduler.launchers:
        raise _error("launcher", f"one of {', '.join(scheduler.launchers)} under {scheduler.title}", launcher)
    for name in ("array", "preemption", "ps_nodes", "memory", "qos", "mail", "stage"):
        if getattr(job, name) and name not in scheduler.takes:
            can = ", ".join(each.title for each in SCHEDULERS.values() if name in each.takes)
            raise _error(name, f"a setting that {scheduler.title} supports", getattr(job, name), f"Supported by: {can}")
    _check_mpi(site, launcher)
    if job.ps_nodes and launcher != "srun":
        raise _error("ps_nodes", "a heterogeneous job started by srun", f"launcher {launcher}")
    if job.ps_nodes and job.array:
        remedy = "Without ps_nodes the servers are among the ranks of each task"
        raise _error("array", "a job of one component: SLURM has no arrays of others", job.array.indices, remedy)
    if job.ps_nodes and job.preemption:
        remedy = "Without ps_nodes the servers are among the ranks, and the job can be put back into the queue"
        raise _error("preemption", "a job of one component", f"{job.ps_nodes} nodes of servers", remedy)
    if job.restarts or job.survive:
        _check_restarts(job, site, launcher)
    if job.check:
        _check_check(job)
    if job.stage:
        _check_stage(job, site)
    _check_gpus(job, site)
    if job.gpu_mpi:
        _check_gpu_mpi(job, site, launcher)
    if site.scheduler == "lsf" and job.array and job.array.first < 1:
        raise _error("array", "indices from 1 under LSF", job.array.indices)
    if site.scheduler == "flux" and any("{{" in word for word in job.program):  # flux run would substitute it
        raise _error("program", "no argument with {{ under Flux, which replaces it", job.program)
    if job.container and site.venv:
        raise _error("container", "the Python of the image", f"the environment {site.venv!r:.80}")


def _check_mpi(site: SiteProfile, launcher: str) -> None:
    legal = ("auto", "pmix") if launcher == "pals" else ("auto",)
    if launcher != "srun" and site.mpi not in legal:
        raise _error("mpi", f"one of {', '.join(legal)} with launcher {launcher}", site.mpi)


def _check_restarts(job: BatchJob, site: SiteProfile, launcher: str) -> None:
    name = "restarts" if job.restarts else "survive"
    for got, fits in (
        (SCHEDULERS[site.scheduler].title, site.scheduler == "slurm"),
        (f"launcher {launcher}", launcher == "srun"),
        (f"mpi {site.mpi}", site.mpi == "auto"),
        (f"{job.ps_nodes} nodes of servers", not job.ps_nodes),
        (f"the image {job.container!r:.80}", not job.container),
    ):
        if not fits:
            raise _error(name, "a SLURM job under srun with the default mpi, without an image or nodes of servers", got)


def _check_check(job: BatchJob) -> None:
    for name in ("module", "numbers", "num_ps", "container", "array", "preemption", "restarts", "survive"):
        if getattr(job, name):
            raise _error("check", f"a job without {name}, which only programs have", getattr(job, name))


def _check_stage(job: BatchJob, site: SiteProfile) -> None:
    for expected, got, fits in (
        ("a virtual environment, which works wherever it lies", site.conda or job.container or site.python, site.venv),
        ("the Python of that environment", site.python, "/" not in site.python),
        ("a program that Python runs", job.program[0], job.module or job.check or job.program[0].endswith(".py")),
        ("a job of one component", f"{job.ps_nodes} nodes of servers", not job.ps_nodes),
        ("a job whose nodes all stay", "restarts or survive", not (job.restarts or job.survive)),
    ):
        if not fits:
            raise _error("stage", expected, got)


def _check_gpus(job: BatchJob, site: SiteProfile) -> None:
    servers = 0 if job.ps_nodes else job.num_ps  # on the nodes of the workers, and without a GPU
    if job.gpus_per_node and job.ranks_per_node * job.nodes - servers > job.gpus_per_node * job.nodes:
        got = f"{job.ranks_per_node} ranks on each node"
        raise _error("gpus_per_node", "a GPU for each rank that trains", f"{job.gpus_per_node} for {got}")
    for name, usual in (("gpu_bind", ""), ("gpu_request", "per_node")):
        if site.scheduler != "slurm" and getattr(site, name) != usual:
            raise _error(
                name, "SLURM, whose option it is", f"{getattr(site, name)} under {SCHEDULERS[site.scheduler].title}"
            )
    per_task = site.gpu_request == "per_task" or site.scheduler in ("lsf", "flux")
    if job.gpus_per_node and per_task and job.gpus_per_node % job.ranks_per_node:
        expected = f"a multiple of {job.ranks_per_node}, the ranks of a node, as {site.name} gives GPUs to ranks"
        raise _error("gpus_per_node", expected, job.gpus_per_node)


def _check_gpu_mpi(job: BatchJob, site: SiteProfile, launcher: str) -> None:
    known = site.gtl or launcher == "jsrun"
    for expected, got, fits in (
        ("a job with GPUs", "gpus_per_node 0", job.gpus_per_node),
        ("a job without an image, which brings its own MPI", f"the image {job.container!r:.80}", not job.container),
        ("a site with Cray MPICH (gtl in its profile) or jsrun; elsewhere MPI needs no setting", site.name, known),
    ):
        if not fits:
            raise _error("gpu_mpi", expected, got)


def _error(name: str, expected: str, got: object, remedy: str = "") -> ValueError:
    return ValueError(explain("Job", name, expected=expected, got=f"{got!s:.120}", remedy=remedy))
