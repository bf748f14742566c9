"""A parameter server on one process, to which tests deliver what workers push."""

from __future__ import annotations

import numpy as np

from mpistrat.comm.process_group import ProcessGroup
from mpistrat.parameter_server.layout import (
    LINE,
    Address,
    MailboxLayout,
    ServerMemory,
    SharedMemory,
    VariableSpec,
    aligned,
)
from mpistrat.parameter_server.operations import Operation, pack
from mpistrat.parameter_server.server.server import VariableServer
from mpistrat.parameter_server.wire.fragments import Fragment, MessageKind
from mpistrat.parameter_server.wire.transport import FOR_GOOD, Port


class Weights:
    """A variable, as far as updaters look at it."""

    def __init__(self, start, name="w", constraint=None):
        self.start = np.asarray(start)
        self.shape, self.dtype, self.name, self.constraint = self.start.shape, self.start.dtype, name, constraint


class Silent(Port):
    def poll(self):
        return 0

    def acknowledge(self, worker, number):
        pass

    def busy(self):
        return False


class ServerHarness:
    """A server with variables; `handle` must be set to its handler.

    Attributes:
        server: the real one.
        variables: `Weights`, by number.
        sent: for each worker the number of its last push.
    """

    def __init__(self, workers, variables):
        group = ProcessGroup.single()
        self.variables, self.sent = variables, [0] * workers
        self._layout = MailboxLayout(workers, 0, 16)
        self._mailbox = ServerMemory(group, None, [0], [self._layout.nbytes], False, False, "mailbox")
        addresses, used = [], 0
        for index, v in enumerate(variables):
            spec = VariableSpec(v.name, v.shape, v.dtype)
            addresses.append(Address(index, spec, 0, used + LINE))
            used += LINE + aligned(max(spec.nbytes, 1))
        slab = ServerMemory(group, None, [0], [used], False, False, "variables")
        memory = SharedMemory(self._layout, self._mailbox, addresses, [slab])
        self.server = VariableServer(group, 0, [0] * workers, memory, [], lambda: 0, 1e-3, threads=False)
        self.server.add_port(Silent(), range(workers))
        for index, v in enumerate(variables):
            with self.server.writing(index) as array:
                array[...] = v.start

    def start(self, handler):
        self.handler = handler
        self.server.start(handler, getattr(handler, "on_leave", None))

    def array(self, variable=0):
        return self.server.array(variable)

    def acknowledged(self, worker):
        """Whether the server has acknowledged all that a worker sent."""
        return self.server.applied[worker] == self.sent[worker]

    # what a worker does

    def push(
        self, worker, values, variable=0, *, rows=None, operation=Operation.GRADIENT, key=0, version=0, commit=False
    ):
        values = np.ascontiguousarray(values, self.variables[variable].dtype)
        payload = values.reshape(-1).view(np.uint8).copy()
        kind = MessageKind.PUSH
        if rows is not None:
            payload = np.concatenate([np.asarray(rows, np.int64).view(np.uint8), payload])
            kind = MessageKind.PUSH_ROWS
        if commit:
            kind |= MessageKind.ENDS_STEP
        self._deliver(
            worker, kind, variable, 0 if rows is None else len(rows), pack(operation, key), version, payload[:]
        )
        payload[...] = 0xAA  # it is valid during the call only

    def commit(self, worker, key=0):
        self._deliver(worker, MessageKind.COMMIT, -1, 0, pack(Operation.GRADIENT, key), 0, np.empty(0, np.uint8))

    def step(self, worker, values, **options):
        """Push a gradient that ends a step."""
        self.push(worker, values, commit=True, **options)

    def leave(self, worker, for_good=False):
        """Sign off, which a worker does when all that it sent is acknowledged."""
        assert self.acknowledged(worker)
        word = self._layout.left(worker) // 8
        self._mailbox.words[word] = FOR_GOOD if for_good else self._mailbox.words[word] + 1
        self.server.rest()

    def _deliver(self, worker, kind, variable, rows, what, version, payload):
        self.sent[worker] += 1
        size = payload.nbytes
        fragment = Fragment(kind, variable, self.sent[worker], rows, what, version, nbytes=size, total=size)
        self.server.deliver(worker, fragment, payload)
