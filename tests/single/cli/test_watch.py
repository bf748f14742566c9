"""What `mpistrat top` and `stacks` get from several nodes through one srun: lines of all, whole, in whatever order."""

import contextlib
import io
import random

from mpistrat.cli.watch import _joined, _print_json


def test_pieces_come_together_again():
    rows = [{"rank": f"rank {rank} of 40", "pid": 100 + rank, "text": 'é\n"x" ' * rank * 30} for rank in range(40)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        _print_json(rows, pieces=True)
    lines = said.getvalue().splitlines()
    assert max(map(len, lines)) < 1000, "srun tears longer ones"
    random.Random(3).shuffle(lines)
    found = _joined(["srun: something else", *lines])
    assert sorted(found, key=lambda row: row["pid"]) == rows


def test_a_rank_of_which_a_piece_is_missing_is_left_out():
    assert _joined(["h1.7 0 2 {", "h1.8 0 1 {}"]) == [{}]
