"""A process between a launcher and a rank's program: whole lines prefixed with the rank, and a file for each rank.

Run by its path, with the standard library only: `rank_output.py VARIABLES TAG FOLDER WORD …`. The program replaces this process,
so it gets signals and returns its status directly. A second process reads its output, and ends after the last of it.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Sequence

_LONGEST = 4096 - 32  # bytes that a launcher's pipe takes atomically; longer lines are folded


def main(variables: str, tag: str, folder: str, *words: str) -> None:
    """Replace this process with a program whose output is tagged or written into files.

    Args:
        variables: names of environment variables with the rank; the first that is set counts.
        tag: "1" for tags.
        folder: of the files, "" for none.
        words: of the program.
    """
    rank = next((os.environ[name] for name in variables.split(",") if os.environ.get(name)), "0")
    file = -1
    if folder:
        try:
            file = _new_file(os.path.join(folder, f"rank-{rank}.txt"))
        except OSError as error:
            sys.exit(f"mpistrat run: --log-dir: rank {rank}: {error}")
    if tag == "1":
        _tagged(f"[{rank}] ".encode(), file)
    else:
        os.dup2(file, 1)
        os.dup2(file, 2)
    os.execvp(words[0], words)


def _new_file(path: str) -> int:
    """Open an empty regular file; reject a link or pipe that another user of the folder has put there.

    Raises:
        OSError: it cannot be created, or something else is there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(f"{path} is not a regular file")
    return file


def _tagged(tag: bytes, file: int) -> None:
    """Send this process's output through a second process, which forwards whole lines."""
    pipes = [os.pipe(), os.pipe()]
    if os.fork():  # the program; this child exits at once, so that the program has no unknown child
        os.wait()
        for number, (_, write) in enumerate(pipes, 1):
            os.dup2(write, number)
        return
    if os.fork():
        os._exit(0)
    os.setsid()  # signals to the program's group do not reach this process
    for _, write in pipes:
        os.close(write)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _forward({pipes[0][0]: 1, pipes[1][0]: 2}, tag, file)
    os._exit(0)


def _forward(ways: dict[int, int], tag: bytes, file: int) -> None:
    """Forward the input line by line until all writers have closed it."""
    import select

    texts = dict.fromkeys(ways, b"")
    while ways:
        for source in select.select(list(ways), [], [])[0]:
            data = os.read(source, 1 << 16)
            *lines, texts[source] = re.split(rb"(?<=\n)", texts[source] + data)
            while len(texts[source]) > _LONGEST or (texts[source] and not data):
                lines.append(texts[source][:_LONGEST])
                texts[source] = texts[source][_LONGEST:]
            for line in filter(None, lines):
                _write(ways[source], tag, line)
                if file >= 0:
                    os.write(file, line)
            if not data:
                os.close(source)
                os.close(ways.pop(source))


def _write(target: int, tag: bytes, line: bytes) -> None:
    line = line.rstrip(b"\n")
    for at in range(0, max(len(line), 1), _LONGEST):
        try:
            os.write(target, tag + line[at : at + _LONGEST] + b"\n")
        except OSError:  # the reader is gone; the file is still written
            return


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    main(*arguments)
