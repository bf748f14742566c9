"""The doctor where a rank cannot write temporary files, or others may read its memory."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.ranks(2, 3)


@pytest.fixture
def topology():
    from mpistrat.cluster.topology import Topology

    made = Topology.create(devices=["cpu:0"])
    yield made
    made.close()


def test_a_rank_that_cannot_write(topology, monkeypatch):
    from mpistrat.doctor import folders

    last, make = topology.size - 1, folders.tempfile.mkstemp

    def fail(**words):
        if topology.rank == last:
            raise PermissionError(13, "Permission denied", "/scratch/tmp")
        return make(**words)

    monkeypatch.setattr(folders.tempfile, "mkstemp", fail)
    finding = folders.check_temporary_folder(topology)
    assert (finding.name, finding.status) == ("temporary folder", "problem")
    assert finding.what == f"rank {last}: [Errno 13] Permission denied: '/scratch/tmp'" and "TMPDIR" in finding.remedy


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_memory_of_a_rank_that_others_may_read(topology, monkeypatch, tmp_path, mode):
    from mpistrat.doctor import rank_probe

    file = tmp_path / "mpich_shm_1"
    file.touch()
    file.chmod(mode)
    mapped = [file] if topology.rank == topology.size - 1 else []
    monkeypatch.setattr(rank_probe, "segments_of_this_process", lambda: mapped)
    finding = rank_probe._segments(topology.comm)
    if mode == 0o600:
        assert finding is None
    else:
        assert finding is not None and (finding.name, finding.status) == ("segments", "warning")
        assert "mpich_shm_1 (mode 0644)" in finding.what and "umask 077" in finding.remedy
