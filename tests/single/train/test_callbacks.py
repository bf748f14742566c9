"""Callbacks decide as Keras's do, in a loop of one's own."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.train.warn_once import WarnOnce

t = ms.train


RISING = (
    "val_f1_score",
    "fbeta_score",
    "r2_score",
    "mean_io_u",
    "io_u",
    "cosine_similarity",
    "pearson_correlation",
    "concordance_correlation",
    "val_auc",
    "top_k_categorical_accuracy",
    "F1",
)  # as Keras's metrics of these names


def loop(rate=None):
    optimizer = None if rate is None else ms.optimizers.SGD(rate)
    return t.Loop(ms.get_strategy(), optimizer)


def epochs(callback, values, name="val_loss", rate=None):
    """The epoch after which the loop stopped, None if it did not, and the rate after each."""
    state, rates = loop(rate), []
    for state.epoch, value in enumerate(values):
        callback.on_epoch_begin(state)
        callback.on_epoch_end(state, {name: value})
        rates.append(None if rate is None else state.optimizer.learning_rate)
        if state.stop_training:
            return state.epoch, rates
    return None, rates


@pytest.mark.parametrize(
    ("settings", "name", "values", "expected"),
    [
        ({}, "val_loss", [3, 2, 2.5, 1], 2),
        ({"patience": 2}, "val_loss", [3, 2, 2.5, 2.2, 1], 3),
        ({"patience": 2}, "val_loss", [3, 2, 2.5, 1.9, 2, 2], 5),
        ({"min_delta": 0.5}, "val_loss", [3, 2, 1.8], 2),
        ({"monitor": "accuracy"}, "accuracy", [0.1, 0.5, 0.4], 2),
        ({"monitor": "x", "mode": "max"}, "x", [1, 2, 3], None),
        ({"start_from_epoch": 2}, "val_loss", [1, 2, 3, 4], 3),
        *(({"monitor": name}, name, [0.1, 0.5, 0.4], 2) for name in RISING),
        *(({"monitor": name}, name, [0.4, 0.5], 1) for name in ("val_hinge", "mean_squared_error", "kl_divergence")),
    ],
)
def test_early_stopping(settings, name, values, expected):
    stopped, _ = epochs(t.EarlyStopping(**settings), values, name)
    assert stopped == expected


def test_the_best_epoch_is_known():
    stop = t.EarlyStopping(patience=2)
    epochs(stop, [3, 2, 1.5, 4, 5])
    assert (stop.best, stop.best_epoch) == (1.5, 2)


@pytest.mark.parametrize(
    ("settings", "values", "expected"),
    [
        ({"patience": 1}, [3, 3, 2, 2], [1, 0.1, 0.1, 0.01]),
        ({"patience": 2, "factor": 0.5}, [3, 3, 3, 3, 3], [1, 1, 0.5, 0.5, 0.25]),
        ({"patience": 1, "min_lr": 0.05}, [3, 3, 3, 3], [1, 0.1, 0.05, 0.05]),
        ({"patience": 1, "cooldown": 1}, [3, 3, 3, 3], [1, 0.1, 0.01, 0.001]),
        ({"patience": 1, "cooldown": 2}, [3, 3, 3, 3, 3], [1, 0.1, 0.1, 0.01, 0.01]),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.8], [1, 0.1]),
    ],
)
def test_the_rate_falls_on_a_plateau(settings, values, expected):
    _, rates = epochs(t.ReduceLROnPlateau(**settings), values, rate=1.0)
    assert rates == pytest.approx(expected)


def test_a_scheduler_may_take_the_epoch_alone():
    _, rates = epochs(t.LearningRateScheduler(lambda epoch: 6.0 / (epoch + 1)), [0, 0, 0], rate=1.0)
    assert rates == [6.0, 3.0, 2.0]
    _, rates = epochs(t.LearningRateScheduler(max), [0, 0], rate=0.5)
    assert rates == [0.5, 1.0]


def test_a_scheduler_sets_the_rate_of_each_epoch():
    _, rates = epochs(t.LearningRateScheduler(lambda epoch, rate: rate / (epoch + 1)), [0, 0, 0], rate=6.0)
    assert rates == [6, 3, 1]


def test_groups_of_torch_keep_their_ratio():
    class Torch:
        param_groups = [{"lr": 0.1}, {"lr": 0.02}]  # noqa: RUF012

    state = t.Loop(ms.get_strategy(), Torch())
    plateau = t.ReduceLROnPlateau("loss", patience=1)
    for state.epoch in range(2):
        plateau.on_epoch_end(state, {"loss": 1.0})
    assert [group["lr"] for group in Torch.param_groups] == pytest.approx([0.01, 0.002])


def test_not_a_number_stops():
    assert epochs(t.TerminateOnNaN(), [1, 2, math.nan, 3])[0] == 2
    assert epochs(t.TerminateOnNaN(), [1, math.inf])[0] == 1


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: epochs(t.EarlyStopping("val_los"), [1]), "EarlyStopping: monitor: expected one of val_loss, got 'val_los'"),
        (lambda: t.EarlyStopping(mode="up"), "mode: expected auto, min or max, got 'up'"),
        (lambda: t.ReduceLROnPlateau(factor=2), "factor"),
        (lambda: epochs(t.LearningRateScheduler(lambda e, r: r), [1]), "learning rate is a number, got none"),
        (lambda: epochs(t.ReduceLROnPlateau(patience=0), [1, 1], rate=ms.optimizers.schedules.ExponentialDecay(1, 1, 0.5)),
         "got a schedule"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(act, words):
    with pytest.raises(ValueError, match=words):
        act()


def test_logs_are_files_of_lines(tmp_path):
    table, lines = t.CSVLogger(tmp_path / "a" / "log.csv"), t.JSONLogger(tmp_path / "log.jsonl")
    state = loop()
    for callback in (table, lines):
        callback.on_train_begin(state)
        for state.epoch, loss in enumerate([2.0, 1.0]):
            callback.on_epoch_end(state, {"loss": loss, "each": np.array([1.0, 2.0])})
        callback.on_train_end(state)
    with (tmp_path / "a" / "log.csv").open(newline="") as file:
        assert [row[:2] for row in csv.reader(file)] == [["epoch", "loss"], ["0", "2.0"], ["1", "1.0"]]
    found = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["loss"], line["each"]) for line in found] == [(0, 2.0, [1, 2]), (1, 1.0, [1, 2])]


@pytest.mark.parametrize("resumed", [False, True])
def test_numbers_of_steps_are_lines_without_an_epoch(tmp_path, resumed):
    """Also of a run that is resumed in the middle of an epoch: lines after it are written again."""
    paths = [tmp_path / "log.csv", tmp_path / "log.jsonl"]
    for first in (0, 3) if resumed else (0,):
        logs = [t.CSVLogger(paths[0]), t.JSONLogger(paths[1])]
        monitor = ms.monitor(tmp_path / "run", config={"a": 1}, loggers=logs, tensorboard=False, progress=False)
        state = loop()
        state.epoch, state.step = first // 2, first
        monitor.on_train_begin(state)
        for state.step in range(first + 1, 5):
            monitor.scalar("rate", 10 * state.step)
            if state.step % 2 == 0:
                monitor.on_epoch_end(state, {"loss": state.step / 2})
                state.epoch += 1
        monitor.on_train_end(state)
    with paths[0].open(newline="") as file:
        names, *rows = csv.reader(file)
    table = [dict(zip(names, row, strict=True)) for row in rows]
    lines = [json.loads(line) for line in paths[1].read_text().splitlines()]
    assert [(row["epoch"], row["step"], row["rate"], row["loss"]) for row in table] == [
        ("NA", "1", "10.0", "NA"), ("NA", "2", "20.0", "NA"), ("0", "2", "NA", "1.0"),
        ("NA", "3", "30.0", "NA"), ("NA", "4", "40.0", "NA"), ("1", "4", "NA", "2.0"),
    ]  # fmt: skip
    assert [(line.get("epoch"), line["step"], line.get("rate"), line.get("loss")) for line in lines] == [
        (None, 1, 10.0, None), (None, 2, 20.0, None), (0, 2, None, 1.0),
        (None, 3, 30.0, None), (None, 4, 40.0, None), (1, 4, None, 2.0),
    ]  # fmt: skip


def test_results_that_come_later_get_a_column(tmp_path):
    path, state = tmp_path / "log.csv", loop()
    log = t.CSVLogger(path)
    log.on_train_begin(state)
    for state.epoch, more in enumerate([{}, {"val_loss": 3.0}, {}, {"val_loss": 2.0, "note": "a,b"}]):
        log.on_epoch_end(state, {"loss": 1.0, **more})
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["epoch", "loss", "val_loss", "note"],
            ["0", "1.0", "NA", "NA"],
            ["1", "1.0", "3.0", "NA"],
            ["2", "1.0", "NA", "NA"],
            ["3", "1.0", "2.0", "a,b"],
        ]


def test_a_table_that_goes_on_keeps_its_columns(tmp_path):
    path, state = tmp_path / "log.csv", loop()
    for logs in ({"loss": 1.0, "accuracy": 0.5}, {"accuracy": 0.75, "loss": 2.0}):
        log = t.CSVLogger(path, append=True)
        log.on_epoch_end(state, logs)
        log.on_train_end(state)
    assert path.read_text().split() == ["epoch,loss,accuracy", "0,1.0,0.5", "0,2.0,0.75"]


@pytest.mark.parametrize("kind", [t.CSVLogger, t.JSONLogger])
def test_a_log_that_is_removed_starts_again_and_one_that_cannot_be_written_is_left(tmp_path, kind, caplog):
    path, state = tmp_path / "logs" / "log", loop()
    log = kind(path)
    log.on_train_begin(state)
    log.on_epoch_end(state, {"loss": 1.0})
    shutil.rmtree(path.parent)
    for state.epoch in (1, 2):
        log.on_epoch_end(state, {"loss": 2.0})
    assert "1,2.0" in path.read_text() or '"epoch": 1' in path.read_text()
    assert len(caplog.records) == 1 and "was removed; it starts again with epoch 1" in caplog.text
    shutil.rmtree(path.parent)
    path.parent.write_text("a file where the folder was")
    for state.epoch in (3, 4):
        log.on_epoch_end(state, {"loss": 3.0})
    log.on_train_end(state)
    assert len(caplog.records) == 2 and "training continues" in caplog.text
    with pytest.raises(OSError):
        log.on_train_begin(state)  # what is wrong from the beginning is an error


@pytest.mark.parametrize(
    ("kind", "content", "logs"),
    [
        (t.CSVLogger, b"\xff\xfe\x00\x00 garbage", {"loss": 1.0}),
        (t.CSVLogger, b"x" * 200_000, {"loss": 1.0}),  # more than the module csv takes
        (t.JSONLogger, b"", {"loss": {1, 2}}),
        (t.JSONLogger, b"", {("a", 1): 2.0}),
    ],
)
def test_what_a_log_cannot_hold_does_not_end_training(tmp_path, kind, content, logs, caplog):
    path, state = tmp_path / "log", loop()
    log = kind(path)
    log.on_train_begin(state)
    path.write_bytes(content)
    for state.epoch in range(3):
        log.on_epoch_end(state, logs)
    log.on_train_end(state)
    assert len(caplog.records) == 1 and "training continues" in caplog.text
    assert path.read_bytes() == content


def test_names_of_results_that_are_not_utf8(tmp_path):
    pytest.importorskip("tensorboardX")
    state, callbacks = loop(), [t.CSVLogger(tmp_path / "log"), t.TensorBoard(tmp_path / "run")]
    for state.epoch in range(2):
        for callback in callbacks:
            callback.on_epoch_end(state, {"l\udcffss": 1.0})
    callbacks[1].on_train_end(state)
    assert (tmp_path / "log").read_text().split() == [r"epoch,l\udcffss", "0,1.0", "1,1.0"]
    assert scalars(tmp_path / "run") == [("l_udcffss", 0, 1.0), ("l_udcffss", 1, 1.0)]  # as tensorboardX has it


def test_a_log_goes_on(tmp_path):
    path, state = tmp_path / "log.csv", loop()
    for _ in range(2):
        log = t.CSVLogger(path, append=True)
        log.on_epoch_end(state, {"loss": 1.0})
        log.on_train_end(state)
    assert path.read_text().split() == ["epoch,loss", "0,1.0", "0,1.0"]


def scalars(folder):
    """What event files hold: (name, step, value), by TensorBoard's record format."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        data, low = path.read_bytes(), 0
        while low < len(data):
            (size,) = struct.unpack_from("<Q", data, low)
            event = Event.FromString(data[low + 12 : low + 12 + size])
            low += 16 + size
            found += [(value.tag, event.step, round(value.simple_value, 6)) for value in event.summary.value]
    return found


def test_tensorboard_has_results_and_the_rate(tmp_path):
    state, board = loop(0.5), t.TensorBoard(tmp_path / "run")
    board.on_train_begin(state)
    for state.epoch, loss in enumerate([2.0, 1.5]):
        board.on_epoch_end(state, {"loss": loss, "each": np.ones(2)})
    board.writer.add_text("note", "hello", 1)
    board.on_train_end(state)
    found = [line for line in scalars(tmp_path / "run") if not line[0].startswith("note")]
    assert found == [("loss", 0, 2.0), ("learning_rate", 0, 0.5), ("loss", 1, 1.5), ("learning_rate", 1, 0.5)]


TENSORBOARD = """
import sys
import mpistrat as ms

sys.path.insert(0, {modules!r})
board, loop = ms.train.TensorBoard({folder!r}), ms.train.Loop(ms.get_strategy())
board.on_train_begin(loop)
board.on_epoch_end(loop, {{"loss": 1.0}})
board.on_train_end(loop)
print("torch" in sys.modules)
import torch
print(torch.imported)
"""


def test_tensorboard_does_not_import_torch(tmp_path):
    """tensorboardX would: some seconds, on one rank, while the others wait."""
    (tmp_path / "torch.py").write_text("imported = True\nTensor = int\n")
    program = TENSORBOARD.format(modules=str(tmp_path), folder=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done
    assert scalars(tmp_path / "run") == [("loss", 0, 1.0)]


def test_event_files_that_cannot_be_written_do_not_end_training(tmp_path, caplog, monkeypatch):
    state, board = loop(), t.TensorBoard(tmp_path / "run")
    board.on_train_begin(state)

    def fail(*args):
        raise ConnectionError("the file system is gone")

    monkeypatch.setattr(board.writer, "add_scalar", fail)
    for state.epoch in range(3):
        board.on_epoch_end(state, {"loss": 1.0})
    board.on_train_end(state)
    assert len(caplog.records) == 1 and "ConnectionError: the file system is gone; training continues" in caplog.text


FULL = """
import resource, sys
import numpy as np
import mpistrat as ms

folder, way = sys.argv[1:]
loop = ms.train.Loop(ms.OneDeviceStrategy())
if way == "monitor":
    run = ms.monitor(folder)
    run.on_train_begin(loop)
else:
    run = ms.train.TensorBoard(folder)
    run.on_train_begin(loop)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))  # as a full disk, for one process
for loop.epoch in range(30):
    if way == "monitor":
        run.histogram("h", np.arange(1000.0))
        run.text("t", "hello" * 1000)
    elif way == "scalars":
        for _ in range(20):
            run.writer.add_scalars("scalars", {"a": 1.0}, loop.epoch)
    run.on_epoch_end(loop, {f"n{i}": 1.0 for i in range(100)})
run.on_train_end(loop)
print("fine")
"""


@pytest.mark.parametrize("way", ["results", "scalars", "monitor"])
def test_event_files_on_a_full_disk(tmp_path, way):
    """A thread of tensorboardX writes them. It died, which ended the job."""
    pytest.importorskip("tensorboardX")
    words = [sys.executable, "-c", FULL, str(tmp_path / "run"), way]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "fine\n", done
    assert done.stderr.count("TensorBoard: ") == 1 and "training continues" in done.stderr, done
    assert "Traceback" not in done.stderr


def test_a_run_that_goes_on_overwrites_what_came_after(tmp_path):
    lines = t.JSONLogger(tmp_path / "log.jsonl")
    table = t.CSVLogger(tmp_path / "log.csv")
    state = loop()
    for first in (0, 2):  # the second time a run that was saved after two epochs
        state.epoch, state.step = first, 5 * first
        for callback in (lines, table):
            callback.on_train_begin(state)
        for state.epoch in range(first, first + 3):
            for callback in (lines, table):
                callback.on_epoch_end(state, {"loss": 10.0 * first + state.epoch})
        for callback in (lines, table):
            callback.on_train_end(state)
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write('{"epoch": 7, "lo')  # killed in the middle of a line
    found = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()[:-1]]
    assert found == [0, 1, 22, 23, 24]
    assert [line.split(",")[1] for line in (tmp_path / "log.csv").read_text().split()] == [
        "loss",
        *map(str, map(float, found)),
    ]


def test_progress_is_a_line_an_epoch():
    file = io.StringIO()
    state, progress = loop(), t.Progress(steps=4, file=file)
    progress.on_epoch_begin(state)
    state.step = 2
    progress.on_step_end(state)
    progress.on_epoch_end(state, {"loss": 0.25, "samples_per_second": 12345.6, "recall": [0.5]})
    assert file.getvalue().startswith("epoch 1: loss 0.25, 12,346 samples/s, recall [0.5], 0.0 s\n")


class Gone(io.StringIO):
    """A terminal that is closed after some time."""

    gone = False

    def isatty(self):
        return True

    def write(self, text):
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("how", ["gone", "closed"])
def test_a_bar_whose_terminal_goes(how, monkeypatch, caplog):
    stream = Gone()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("mpistrat.train.logs.reaches_terminal", lambda name: True)
    state, progress = loop(), t.Progress(steps=1)
    progress.on_train_begin(state)
    for state.epoch in range(3):
        progress.on_epoch_begin(state)
        if state.epoch == 1:
            if how == "closed":
                stream.close()
            stream.gone = True
        state.step += 1
        progress.on_step_end(state)
        progress.on_epoch_end(state, {"loss": 0.25})
    progress.on_train_end(state)
    assert sys.stderr is stream
    assert len(caplog.records) == 1 and "Progress: " in caplog.text


def test_a_line_that_its_file_cannot_encode():
    raw = io.BytesIO()
    progress = t.Progress(file=io.TextIOWrapper(raw, "ascii"))
    progress.on_epoch_end(loop(), {"précision": 1.0})
    assert raw.getvalue().startswith(rb"epoch 1: pr\xe9cision 1, ")


def test_a_monitor_of_names_that_are_not_utf8(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    monkeypatch.setattr(sys, "argv", ["program.py", "a\udcff"])
    with ms.monitor(tmp_path / "r\udcffn", config={"k\udcff": "v\udcff"}, progress=False) as run:
        run.text("t\udcff", "hello \udcff")
        run.epoch({"l\udcffss": 1.0})
    page = (tmp_path / "r\udcffn" / "run.html").read_text()
    assert all(text in page for text in (r"r\udcffn", r"a\udcff", r"k\udcff", r"v\udcff", r"l\udcffss"))


def test_an_error_of_a_collective_is_not_taken_for_one_of_the_record(caplog):
    """CollectiveTimeoutError is an OSError, as TimeoutError is."""
    with pytest.raises(ms.errors.CollectiveTimeoutError), WarnOnce("the trace", OSError):
        raise ms.errors.CollectiveTimeoutError("rank 1 did not come")
    assert not caplog.records


def test_numbers_of_other_libraries_are_results(tmp_path):
    class Numbers(t.Logger):
        def open(self, loop):
            self.seen = []

        def metrics(self, values, step, epoch):
            self.seen.append(values)

    numbers, text = Numbers("numbers"), io.StringIO()
    state, table = loop(), t.CSVLogger(tmp_path / "log.csv")
    logs = {"a": np.float32(0.5), "b": np.array(2), "c": np.float64("nan"), "d": np.ones(2), "e": "text"}
    for callback in (numbers, t.Progress(file=text), table):
        callback.on_epoch_begin(state)
        callback.on_epoch_end(state, logs)
    assert str(numbers.seen) == "[{'a': 0.5, 'b': 2.0, 'c': nan}]"
    assert text.getvalue().startswith("epoch 1: a 0.5, b 2, c nan, d [1. 1.], e text")
    t.TerminateOnNaN().on_epoch_end(state, {"a": np.float32("inf")})
    assert state.stop_training


@pytest.mark.parametrize(
    "kind", [t.EarlyStopping, t.ReduceLROnPlateau, lambda: t.ModelCheckpoint("x.h5", save_best_only=True)]
)
def test_epochs_without_validation_do_not_count(kind, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with ms.OneDeviceStrategy() as strategy:
        with strategy.scope():
            loss, optimizer = t.Mean("loss"), ms.optimizers.SGD(1.0)
        data = strategy.distribute_dataset(ms.data.from_arrays(np.ones(4)).batch(2))
        trainer = t.Trainer(
            strategy, loss.update_state, loss.update_state, metrics=[loss], optimizer=optimizer, callbacks=[kind()]
        )
        history = trainer.fit(data, 6, validation_data=data, validation_freq=2)
        # the second validation is no better than the first
        assert len(history["loss"]) == (4 if kind is t.EarlyStopping else 6)
        with pytest.raises(ValueError, match="monitor: expected one of loss, got 'val_loss'"):
            t.Trainer(strategy, loss.update_state, metrics=[loss], callbacks=[kind()]).fit(data)


def test_a_checkpoint_makes_its_folder_and_refuses_unknown_results(tmp_path):
    logs = {"loss": np.float32(0.5)}
    with ms.OneDeviceStrategy() as strategy, strategy.scope():
        ms.Variable(1.0, name="w")
        state = t.Loop(strategy)
        t.ModelCheckpoint(tmp_path / "new" / "{epoch:02d}" / "{loss:.2f}.h5").on_epoch_end(state, logs)
        assert (tmp_path / "new" / "01" / "0.50.h5").exists()
        for name in ("{acc:.2f}.h5", "{loss:d}.h5", "{}.h5"):
            with pytest.raises(ValueError, match="filepath: expected a name with {epoch} and these results: loss, got"):
                t.ModelCheckpoint(tmp_path / name).on_epoch_end(state, logs)
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match=r"file.*x\.h5"):
            t.ModelCheckpoint(tmp_path / "file" / "x.h5").on_epoch_end(state, logs)
