"""What each rank sends in a step, by the form in which numbers travel between nodes: bytes, in a JSON file.

Started by test_wire_bytes.py with count_mpi.c preloaded, and a folder for its files.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import numpy as np

import mpistrat as ms

SIZE = 1 << 20


def main() -> None:
    counter, text, sent = ctypes.CDLL(os.environ["LD_PRELOAD"]), ctypes.create_string_buffer(1 << 18), {}
    for form in (None, "bfloat16", "int8"):
        options = ms.CommunicationOptions(wire=form)
        with ms.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
            with strategy.scope():
                optimizer, wide = ms.optimizers.Adam(1e-3), ms.Variable(np.zeros(SIZE, np.float32), name="wide")
            for number in range(2):
                if number == 1:  # of one step, after the first
                    counter.count_mpi_begin()
                strategy.run(lambda o, v: o.apply_gradients([(v.grad, v)]), args=(optimizer, wide))
            counter.count_mpi_write(text, ctypes.c_long(len(text)))
            rows = [line.split() for line in text.value.decode().splitlines()]
            sent[str(form)] = sum(int(nbytes) for function, _, _, nbytes in rows if function == "Isend")
            nodes, rank = strategy.extended.process_group.num_nodes, strategy.rank
    (Path(sys.argv[1]) / f"rank-{rank}.json").write_text(json.dumps({"nodes": nodes, "size": SIZE, "sent": sent}))


if __name__ == "__main__":
    main()
