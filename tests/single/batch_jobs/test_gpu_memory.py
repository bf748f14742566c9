"""Scripts for GPUs: memory of GPUs in Cray MPICH and Spectrum MPI, NCCL's plugin for Slingshot."""

import os
import subprocess

import pytest

from mpistrat.batch_jobs import BatchJob, SiteProfile, read_site, render

GPUS = BatchJob(program=("train.py",), nodes=2, ranks_per_node=4, gpus_per_node=4)
CRAY = [("cray-slingshot", "cuda"), ("perlmutter", "cuda"), ("frontier", "hsa"), ("lumi", "hsa")]


def changed(**settings):
    return BatchJob(**{**vars(GPUS), **settings})


@pytest.mark.parametrize(("name", "library"), CRAY)
def test_cray_mpich_gets_memory_of_gpus_only_where_a_job_asks(name, library):
    """With the variable at 1, and without the library, MPI_Init ends the program: "GTL library is not linked"."""
    usual, asked = render(GPUS, read_site(name)), render(changed(gpu_mpi=True), read_site(name))
    assert "export MPICH_GPU_SUPPORT_ENABLED=0\n" in usual and "LD_PRELOAD" not in usual
    assert "export MPICH_GPU_SUPPORT_ENABLED=1\n" in asked and "ENABLED=0" not in asked
    assert f'/gtl/lib/libmpi_gtl_{library}.so"' in asked


def test_the_users_variable_comes_first():
    site = SiteProfile(gtl="mpi_gtl_cuda", variables={"MPICH_GPU_SUPPORT_ENABLED": "1"})
    assert "MPICH_GPU_SUPPORT_ENABLED=0" not in render(GPUS, site)


def test_the_library_is_loaded_by_the_ranks_alone(tmp_path):
    """Run the script's last lines with an `srun` that prints what a rank gets."""
    script = render(changed(gpu_mpi=True), read_site("frontier"))
    part = "program=(python train.py)\n" + script[script.index("# Cray MPICH accepts") :]
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$0: $LD_PRELOAD"; echo "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CRAY_MPICH_ROOTDIR": "/opt/mpich", "SLURM_MPI_TYPE": "none"}
    said = subprocess.run(["bash", "-eu", "-c", part], env=paths, capture_output=True, text=True, check=True).stdout
    first, rank = said.splitlines()
    assert first.endswith("srun: ")
    assert rank.endswith("env LD_PRELOAD=/opt/mpich/gtl/lib/libmpi_gtl_hsa.so python train.py")


@pytest.mark.parametrize("name", [*dict(CRAY), "alps"])
@pytest.mark.parametrize("plugin", ["libnccl-net.so", "libnccl-net-ofi.so.0", ""])
def test_nccl_takes_slingshot_where_its_plugin_is(name, plugin, tmp_path):
    script = render(GPUS, read_site(name))
    first = script.index('plugin=""')
    part = script[first : script.index("\nfi\n", first) + 4] + 'echo "net: ${NCCL_NET:-none}"\n'
    if plugin:
        (tmp_path / plugin).touch()
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    done = subprocess.run(["bash", "-eu", "-c", part], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ("net: AWS Libfabric\n" if plugin else "net: none\n")
    assert ("no NCCL plugin" in done.stderr) == (not plugin)


@pytest.mark.parametrize("settings", [{"gpus_per_node": 0}, {"nodes": 1}, {"container": "image.sif"}])
def test_other_jobs_do_not_look_for_the_plugin(settings):
    site = read_site("cray-slingshot")
    assert "NCCL_NET" in render(GPUS, site) and "NCCL_NET" not in render(changed(**settings), site)


def test_a_task_reaches_all_gpus_of_its_node():
    """A task that is given one GPU cannot reach those of others by NVLink."""
    for name in ("alps", "perlmutter"):
        script = render(GPUS, read_site(name))
        assert "#SBATCH --gpus-per-node=4\n#SBATCH --gpu-bind=none\n" in script


def test_spectrum_mpi_is_told_of_gpus():
    """Without it, a pointer to a GPU's memory in MPI is a crash."""
    site = SiteProfile(scheduler="lsf")
    assert "--gpu_per_rs 1 --smpiargs=-gpu " in render(GPUS, site)
    assert "smpiargs" not in render(changed(gpus_per_node=0), site)


@pytest.mark.parametrize(
    ("settings", "site", "got"),
    [
        ({"gpus_per_node": 0}, read_site("frontier"), "gpus_per_node 0"),
        ({"container": "image.sif"}, read_site("frontier"), "the image 'image.sif'"),
        ({}, SiteProfile(), "generic"),
    ],
)
def test_memory_of_gpus_is_refused_where_it_would_have_no_effect(settings, site, got):
    with pytest.raises(ValueError, match=f"gpu_mpi: expected .*got {got}"):
        render(changed(gpu_mpi=True, **settings), site)


def test_sites_with_amd_gpus_say_that_none_was_seen():
    for name, library in CRAY:
        assert ("never run on AMD GPUs" in read_site(name).about) == (library == "hsa")
