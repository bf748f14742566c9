"""Files that are replaced as a whole, and what killed processes leave beside them."""

import fcntl
import os
import stat

import pytest

from mpistrat.base import files
from mpistrat.base.files import read_whole, replacing


def beside(folder):
    return [path for path in folder.iterdir() if path.suffix == ".part"]


def test_replaced_or_as_it_was(tmp_path):
    path = tmp_path / "x"
    umask = os.umask(0o027)
    try:
        with replacing(path) as part:
            assert part.parent == tmp_path and part in beside(tmp_path)
            part.write_text("first")
    finally:
        os.umask(umask)
    assert path.read_text() == "first" and stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(ZeroDivisionError), replacing(path) as part:
        part.write_text("second")
        _ = 1 / 0
    assert path.read_text() == "first" and not beside(tmp_path)
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "none" / "x"):
        pass


def test_readers_that_lock_a_file_do_not_wait_for_its_folder_to_be_flushed(tmp_path, monkeypatch):
    """HDF5 opens no file that another process has locked."""
    path, flushed = tmp_path / "x", []

    def flush(folder):
        with path.open() as reader:
            fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
        flushed.append(folder)

    monkeypatch.setattr(files, "flush_folder", flush)
    with replacing(path) as part:
        part.write_text("whole")
    assert flushed == [tmp_path]


def test_two_writers_of_one_file(tmp_path):
    """Neither shares the other's part, nor takes it for a dead one."""
    path = tmp_path / "x"
    with replacing(path) as first, replacing(path) as second:
        assert first != second and len(beside(tmp_path)) == 2
        first.write_text("1")
        second.write_text("2")
    assert path.read_text() == "1" and not beside(tmp_path)


def test_what_a_killed_writer_left_is_removed(tmp_path):
    path, precious = tmp_path / "x.h5", tmp_path / "precious"
    child = os.fork()
    if not child:
        with replacing(path) as part:
            part.write_text("half")
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert len(beside(tmp_path)) == 1 and not path.exists()
    precious.write_text("kept")
    (tmp_path / ".x.h5.1234.part").write_text("of an earlier version")
    for other in (".x.h5.1.part.part", ".y.h5.1.part", ".x.h5.name.part"):
        (tmp_path / other).write_text("another file's")
    (tmp_path / ".x.h5.2.part").symlink_to(precious)
    (tmp_path / ".x.h5.3.part").mkdir()
    with (tmp_path / ".x.h5.4.part").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with replacing(path) as part:
            part.write_text("whole")
    names = {each.name for each in beside(tmp_path)}
    assert names == {f".{x}.part" for x in ("x.h5.1.part", "y.h5.1", "x.h5.name", "x.h5.2", "x.h5.3", "x.h5.4")}
    assert path.read_text() == "whole" and precious.read_text() == "kept"


def test_without_locks_nothing_is_taken_for_dead(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(38, "no locks on this file system")

    monkeypatch.setattr(fcntl, "flock", none)
    (tmp_path / ".x.1.part").write_text("")
    with replacing(tmp_path / "x") as part:
        part.write_text("whole")
    assert (tmp_path / "x").read_text() == "whole" and [each.name for each in beside(tmp_path)] == [".x.1.part"]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("relative", [True, False])
def test_a_link_is_written_through(tmp_path, monkeypatch, there, relative):
    """As h5py, np.save and torch.save do. It was replaced by a file, which filled the home folder in place of scratch."""
    (tmp_path / "home").mkdir()
    (tmp_path / "scratch").mkdir()
    link, target = tmp_path / "home" / "x", tmp_path / "scratch" / "y"
    if there:
        target.write_text("old")
    (tmp_path / "scratch" / "again").symlink_to("y")
    link.symlink_to("../scratch/again" if relative else tmp_path / "scratch" / "again")
    monkeypatch.chdir(tmp_path / "home")
    with replacing(files.Path("x") if relative else link) as part:
        assert part.parent == tmp_path / "home" / ".." / "scratch" if relative else target.parent
        part.write_text("new")
    assert link.is_symlink() and target.read_text() == "new" and not target.is_symlink()
    assert not beside(tmp_path / "home") and not beside(tmp_path / "scratch")


def test_links_that_lead_nowhere(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels of symbolic links"), replacing(tmp_path / "a"):
        pass
    (tmp_path / "c").symlink_to("none/c")
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "c"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes links for other users")
def test_the_link_of_another_user_in_a_folder_for_all(tmp_path):
    """Which leads to a file of this user that is to be overwritten."""
    folder, victim = tmp_path / "tmp", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("old")
    folder.chmod(0o1777)
    (folder / "x").symlink_to(victim)
    os.lchown(folder / "x", 12345, 12345)
    with pytest.raises(PermissionError, match="a symbolic link of another user"), replacing(folder / "x"):
        pass
    assert victim.read_text() == "old" and not beside(folder)
    folder.chmod(0o755)
    with replacing(folder / "x") as part:
        part.write_text("new")
    assert victim.read_text() == "new"


def test_a_file_is_read_whole_unless_it_is_too_large(tmp_path):
    (path := tmp_path / "x").write_bytes(b"four")
    (link := tmp_path / "link").symlink_to(path)
    assert read_whole(path, 4) == read_whole(str(link), 4) == b"four"
    with pytest.raises(OSError, match="x' is larger than 3 bytes"):
        read_whole(path, 3)
    with pytest.raises(FileNotFoundError):
        read_whole(tmp_path / "none")


def test_what_never_ends_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="is not a regular file"):
            read_whole(path)
