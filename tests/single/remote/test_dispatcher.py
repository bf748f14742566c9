"""The chief's thread, without MPI."""

import threading
from types import SimpleNamespace

from mpistrat.remote.dispatcher import Dispatcher


def test_a_stop_between_two_looks_of_the_thread_is_seen():
    dispatcher = Dispatcher.__new__(Dispatcher)

    class StoppedHere(threading.Event):
        """`stop` comes just before the thread clears the event."""

        def clear(self):
            dispatcher._stopping = True
            self.set()
            super().clear()

    dispatcher._stopping, dispatcher._wake = False, StoppedHere()
    dispatcher._queue, dispatcher._parked, dispatcher._workers = (), 0, []
    dispatcher._channel = SimpleNamespace(sending=lambda: False)
    thread = threading.Thread(target=dispatcher._run, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
