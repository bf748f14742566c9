"""Which pushes a server applies and acknowledges, on one process."""

import numpy as np
import pytest

from mpistrat.comm.process_group import ProcessGroup
from mpistrat.parameter_server.layout import Address, MailboxLayout, ServerMemory, SharedMemory, VariableSpec
from mpistrat.parameter_server.server.server import VariableServer
from mpistrat.parameter_server.wire.fragments import Fragment, MessageKind
from mpistrat.parameter_server.wire.transport import Port


class Pushes(Port):
    """A port on which the pushes of worker 0 come that it is given."""

    def __init__(self):
        self.coming, self.told = [], []

    def poll(self):
        if not self.coming:
            self.sign_off()  # as a worker does, after its pushes
            return False
        number = self.coming.pop(0)
        data = np.array([number], np.int64).view(np.uint8)
        self.server.deliver(0, Fragment(MessageKind.PUSH, 0, number, nbytes=8, total=8), data)
        return True

    def acknowledge(self, worker, number):
        self.told.append(number)

    def busy(self):
        return False


@pytest.fixture
def served():
    """`served(numbers, answers)` lets pushes come, for which the handler returns `answers`; it returns what happened."""
    group = ProcessGroup.single()
    layout = MailboxLayout(1, 0, 16)
    mailbox = ServerMemory(group, None, [0], [layout.nbytes], False, False, "mailbox")
    slab = ServerMemory(group, None, [0], [256], False, False, "variables")
    addresses = [Address(i, VariableSpec("v", (1,), np.dtype(np.int64), server=i), 0, 64) for i in range(2)]
    server = VariableServer(
        group, 0, [0], SharedMemory(layout, mailbox, addresses, [slab]), [], lambda: None, 1e-3, threads=False
    )
    port = Pushes()
    port.server = server
    server.add_port(port, [0])

    def serve(numbers, answers=()):
        answers, applied = list(answers), []
        port.coming[:] = numbers
        passes = mailbox.words[layout.left(0) // 8] + 1

        def sign_off():
            mailbox.words[layout.left(0) // 8] = passes

        port.sign_off = sign_off
        server.start(lambda push: applied.append(push.number) or (answers and answers.pop(0)))
        server.wait()
        return applied

    serve.server, serve.told = server, port.told
    return serve


def test_each_number_is_applied_once_and_in_order(served):
    assert served([1, 2, 2, 1, 3]) == [1, 2, 3]
    assert served.told == [1, 2, 3]
    assert served([3, 4]) == [4]
    with pytest.raises(RuntimeError, match="push 6 of worker 0 is out of order: expected push 5"):
        served([6])


def test_what_is_kept_is_not_acknowledged_and_holds_back_what_follows(served):
    assert served([1, 2, 3], [None, False, None]) == [1, 2, 3]
    assert served.told == [1]
    with pytest.raises(ValueError, match="Server.acknowledge: number: expected 1 <= number <= 3, got 4"):
        served.server.acknowledge(0, 4)
    served.server.acknowledge(0, 3)
    assert served([4]) == [4]
    assert served.told == [1, 3, 4]


def test_a_variable_is_written_in_a_context_only(served):
    server = served.server
    with pytest.raises(ValueError, match="read-only"):
        server.array(0)[0] = 1
    with server.writing(0) as value:
        value[0] = 5
    assert (server.array(0).tolist(), server.version(0)) == ([5], 1)
    with pytest.raises(ZeroDivisionError), server.writing(0):
        _ = 1 // 0
    assert server._slabs[0].words[0] & 1  # closed to readers: it may be half written


def test_a_variable_of_another_server_is_refused(served):
    server = served.server
    for function in (server.array, server.writing, server.replacing, server.version):
        error = f"^Server.{function.__name__}: variable: expected a variable of server 0, got variable 'v' of server 1$"
        with pytest.raises(ValueError, match=error):
            function(1)
