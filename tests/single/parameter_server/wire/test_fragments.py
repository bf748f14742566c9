"""Messages cut into fragments and put together again; where things lie in a mailbox."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.parameter_server.layout import LINE, MailboxLayout, VariableSpec
from mpistrat.parameter_server.wire.fragments import LARGEST_WHAT, Assembly, Fragment, cut


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=4), st.integers(1, 50))
def test_a_message_comes_together_from_its_parts(pieces, chunk_bytes):
    arrays = [np.frombuffer(piece, np.uint8) for piece in pieces]
    whole, assembly, header = b"".join(pieces), Assembly(), np.zeros(LINE, np.uint8)
    results = []
    message = Fragment(3, -1, 2, 5, LARGEST_WHAT, 7)
    for fragment, payload in cut(message._replace(nbytes=len(whole), total=len(whole)), arrays, chunk_bytes):
        assert fragment.nbytes <= chunk_bytes
        fragment.write(header)
        assert Fragment.read(header) == fragment
        assert (fragment[:6], fragment.total) == (message[:6], len(whole))
        data = np.concatenate([*payload, np.empty(0, np.uint8)])
        assert data.nbytes == fragment.nbytes
        results.append(assembly.add(fragment, data))
    assert all(result is None for result in results[:-1])
    assert results[-1].tobytes() == whole


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 300))
def test_no_two_things_share_a_line_or_a_slot(workers, slots, chunk_bytes):
    layout = MailboxLayout(workers, slots, chunk_bytes)
    lines = [
        {getattr(layout, word)(w) // LINE for word in words}
        for words in (("announced", "posted", "left", "clock"), ("taken", "applied"))
        for w in range(workers)
    ]
    assert all(len(line) == 1 for line in lines)
    assert len(set.union(*lines)) == len(lines) == layout.words_bytes // LINE
    starts = sorted(layout.slot(w, fragment) for w in range(workers) for fragment in range(slots))
    assert starts[0] >= layout.words_bytes
    assert all(b - a >= LINE + chunk_bytes for a, b in zip(starts, [*starts[1:], layout.nbytes], strict=True))
    assert layout.slot(0, slots + 1) == layout.slot(0, 1)


def test_specs():
    assert VariableSpec("a", (3, 5), np.float16).nbytes == 30
    assert VariableSpec("a", (3, 5), np.float16).row_bytes == 10
    with pytest.raises(TypeError, match="dtype"):
        VariableSpec("a", (), np.dtype(object))
