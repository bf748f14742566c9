"""Training that ends in the middle, as a kill would end it."""

import mpistrat as ms


class Interrupt(Exception):
    pass


class Stop(ms.train.Callback):
    """Raises an error after so many steps; None for never."""

    def __init__(self, after):
        self.after = after

    def on_step_end(self, loop):
        if loop.step == self.after:
            raise Interrupt
