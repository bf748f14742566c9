"""`mpistrat doctor --ranks` where ranks see GPUs: it tries NCCL, and MPI's sums of GPUs' memory, on the stand-in for CuPy."""

import pytest

from tests.harness.doctor_runs import documented, rank_program
from tests.parallel.doctor.test_ranks import doctor_run, on_path

CUPY = """
from tests.models import honest_cupy
honest_cupy.install()
"""
NO_SUM = "honest_cupy.NcclCommunicator.allReduce = lambda *arguments: None\n"
ENDS = "import os\nhonest_cupy.NcclCommunicator.allReduce = lambda *arguments: os.abort()\n"
AWARE = """
from mpi4py import MPI
from mpistrat.comm import gpu_support
from mpistrat.doctor import transfers

def sum_by_host(comm, array):
    host = array.get()
    comm.Allreduce(MPI.IN_PLACE, host)
    array.set(host)

gpu_support.ask = lambda **options: True
transfers.all_reduce_gpu = sum_by_host
"""


def examined(mpi_run, folder, text="", gpus=2):
    """Run the doctor on two ranks with GPUs; `text` changes the stand-in of both, or of each."""
    texts = (text, text) if isinstance(text, str) else text
    variables = {
        rank: {"PYTHONPATH": on_path(folder / str(rank), "cupy", CUPY + own), "FAKE_GPUS": str(gpus)}
        for rank, own in enumerate(texts)
    }
    return doctor_run(mpi_run(rank_program(variables), 2, timeout=100))


def test_nccl_sums_over_the_gpus_that_the_ranks_take(mpi_run, tmp_path):
    found = examined(mpi_run, tmp_path)
    assert found.finding("GPUs")["what"] == "2, each used by one rank"
    assert found.finding("NCCL")["status"] == "OK" and "4 MiB over 2 GPUs" in found.finding("NCCL")["what"]
    assert found.names() <= documented("On the ranks of a job") and not found.findings("CUDA-aware MPI")
    assert [row["buses"] for row in found.document["ranks"]] == [["0000:00:00.0", "0000:01:00.0"]] * 2


def test_ranks_that_share_a_gpu(mpi_run, tmp_path):
    found = examined(mpi_run, tmp_path, gpus=1)
    assert found.finding("NCCL")["status"] == "warning"
    assert "ranks 0, 1 share the GPU 0000:00:00.0 of node 0" in found.finding("NCCL")["what"]


@pytest.mark.parametrize(
    ("text", "says"), [(NO_SUM, "the sum is wrong on ranks 0, 1"), ((ENDS, NO_SUM), "sum by NCCL ended with signal 6")]
)
def test_nccl_that_fails(mpi_run, tmp_path, text, says):
    found = examined(mpi_run, tmp_path, text)
    assert found.finding("NCCL")["status"] == "problem" and says in found.finding("NCCL")["what"]


def test_mpi_that_takes_memory_of_gpus(mpi_run, tmp_path):
    """The stand-in's memory goes to this MPI through the host, as its library would read it from a GPU."""
    found = examined(mpi_run, tmp_path, AWARE)
    assert found.finding("CUDA-aware MPI")["status"] == "OK"
    assert "4 MiB over 2 ranks" in found.finding("CUDA-aware MPI")["what"]
