"""Programs of Keras with callbacks, settings, files, and other ways to go over data."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import mpistrat as ms
from tests.nets.patterns import keras_models as zoo
from tests.nets.patterns.keras_program import Program

callbacks = keras.callbacks


class EarlyStopping(Program):
    validates = True
    epochs = 6

    def callbacks(self) -> list[Any]:
        return [callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)]


class Plateau(Program):
    validates = True
    epochs = 5

    def callbacks(self) -> list[Any]:
        return [callbacks.ReduceLROnPlateau("val_loss", patience=0, factor=0.3, min_delta=0.2)]


class RateScheduler(Program):
    def callbacks(self) -> list[Any]:
        return [callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)]


class Schedule(Program):
    """A schedule with a warm-up."""

    def optimizer(self) -> Any:
        schedule = keras.optimizers.schedules.CosineDecay(0.02, 10, warmup_steps=3, warmup_target=0.05)
        return keras.optimizers.Adam(schedule, epsilon=1e-3)


class Averages(Program):
    """use_ema, which overwrites the weights at an epoch's end or every third step; evaluate twice."""

    optimizer_options = {"use_ema": True, "ema_momentum": 0.8}  # noqa: RUF012

    def optimizer(self) -> Any:
        often = [None, 3][self.config["seed"] % 2]
        return zoo.OPTIMIZERS[self.config["optimizer"]](ema_overwrite_frequency=often, **self.optimizer_options)

    def train(self) -> Any:
        history = self.fit()
        self.model.evaluate(self.held_x, self.held_y, batch_size=self.batch_rows, verbose=0)
        return history


class SwappedAverages(Averages):
    validates = True

    def callbacks(self) -> list[Any]:
        return [callbacks.SwapEMAWeights(swap_on_epoch=bool(self.config["seed"] % 2))]


class Accumulated(Program):
    optimizer_options = {"gradient_accumulation_steps": 2}  # noqa: RUF012


class ClippedNorm(Program):
    optimizer_options = {"clipnorm": 0.1}  # noqa: RUF012


class ClippedGlobalNorm(Program):
    optimizer_options = {"global_clipnorm": 0.1}  # noqa: RUF012


class ClippedValues(Program):
    optimizer_options = {"clipvalue": 0.01}  # noqa: RUF012


class ExcludedFromDecay(Program):
    def optimizer(self) -> Any:
        optimizer = keras.optimizers.AdamW(0.02, weight_decay=0.5, epsilon=1e-3)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer


class OtherOptimizers(Program):
    """Optimizers that look at whole variables."""

    optimizers = ("adafactor", "muon", "lamb")
    tolerance = 1e-3


class LossScale(Program):
    optimizers = ("sgd", "adam", "adamw")

    def optimizer(self) -> Any:
        return keras.optimizers.LossScaleOptimizer(super().optimizer(), initial_scale=8.0, dynamic_growth_steps=3)


class Eager(Program):
    compile_options = {"run_eagerly": True}  # noqa: RUF012


class Split(Program):
    fit_options = {"validation_split": 0.31}  # noqa: RUF012
    validates = False


class SeldomValidated(Program):
    validates = True

    def fit(self, **options: Any) -> Any:
        return super().fit(validation_freq=2, validation_batch_size=self.batch_rows - 1, **options)


class ValidatedByOwnData(Program):
    validates = False

    def fit(self, **options: Any) -> Any:
        held = (self.held_x, self.held_y)
        if self.env.plain:
            return super().fit(validation_data=held, validation_batch_size=self.batch_rows, **options)
        return super().fit(validation_data=ms.data.from_arrays(held).batch(self.batch_rows), **options)


class FineTuning(Program):
    """A layer is frozen, and thawed, with a compile after each."""

    def train(self) -> Any:
        self.fit()
        for trainable in (False, True):
            self.model.layers[-2].trainable = trainable
            self.compile()
            history = self.fit()
        return history


class TwoFits(Program):
    def train(self) -> Any:
        self.fit()
        return self.fit(epochs=2)


class CompiledAgain(Program):
    def train(self) -> Any:
        self.fit()
        self.compile()
        self.model.optimizer.learning_rate = 0.003
        return self.fit()


class SaveAndLoad(Program):
    def train(self) -> Any:
        self.fit()
        path = self.own_path("model.keras")
        self.model.save(path)
        self.env.barrier()
        self.model = self.distribute(keras.models.load_model(path))
        self.env.barrier()
        return self.fit()


class Backup(Program):
    """BackupAndRestore: a fit that an error ends in the third epoch, and one that continues it."""

    epochs = 4

    def train(self) -> Any:
        folder = self.own_path("backup")

        class Stop(callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if epoch == 2:
                    raise KeyboardInterrupt

        try:
            self.fit(callbacks=[callbacks.BackupAndRestore(folder), Stop()])
        except KeyboardInterrupt:
            pass
        self.env.barrier()
        for variable in self.model.trainable_variables:
            variable.assign(variable * 0.5)
        return self.fit(callbacks=[callbacks.BackupAndRestore(folder)])


class InEpoch(Program):
    """A callback evaluates, predicts, and changes weights and rates at each epoch's end."""

    validates = False

    def callbacks(self) -> list[Any]:
        program = self

        class Busy(callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                options = {"batch_size": program.batch_rows, "verbose": 0}
                if program.config["seed"] % 2:
                    program.keep(f"loss {epoch}", self.model.evaluate(program.held_x, program.held_y, **options))
                    program.keep(f"output {epoch}", self.model.predict(program.held_x, **options))
                    self.model.optimizer.learning_rate = 0.01 * (epoch + 1)
                else:
                    for variable in self.model.trainable_variables:
                        variable.assign(variable * 0.95)

        return [Busy()]


class SetWeights(Program):
    def callbacks(self) -> list[Any]:
        class Smaller(callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                layer = self.model.layers[-1]
                layer.set_weights([0.9 * weights for weights in layer.get_weights()])

        return [Smaller()]


class NotANumber(Program):
    """A row of NaN, and TerminateOnNaN."""

    def prepare_data(self) -> None:
        self.x = self.x.copy()
        self.x[-1] = np.nan

    def callbacks(self) -> list[Any]:
        return [callbacks.TerminateOnNaN(), callbacks.CSVLogger(self.own_path("log.csv"))]


class StepsPerEpoch(Program):
    fit_options = {"steps_per_epoch": 2}  # noqa: RUF012


class InitialEpoch(Program):
    fit_options = {"initial_epoch": 1}  # noqa: RUF012


class EvaluatedInSteps(Program):
    def evaluated(self) -> dict[str, Any]:
        return {"steps": 1}


class OnBatch(Program):
    """train_on_batch and test_on_batch of each rank's rows."""

    kinds = ("equal",)
    validates = False

    def part(self, start: int) -> slice:
        rows = self.batch_rows // self.env.size
        return slice(start + self.env.rank * rows, start + (self.env.rank + 1) * rows)

    def train(self) -> Any:
        for _ in range(2):
            for start in range(0, self.rows, self.batch_rows):
                part = self.part(start)
                self.model.train_on_batch(self.x[part], self.y[part])


class Generator(OnBatch):
    """A generator of each rank's rows."""

    def train(self) -> Any:
        def batches() -> Any:
            while True:
                for start in range(0, self.rows, self.batch_rows):
                    part = self.part(start)
                    yield self.x[part], self.y[part]

        arguments = self.fit_arguments(steps_per_epoch=self.rows // self.batch_rows)
        del arguments["batch_size"], arguments["shuffle"]
        return self.model.fit(batches(), **arguments)


class PyDataset(Program):
    """A keras.utils.PyDataset, which is refused."""

    validates = False

    def train(self) -> Any:
        arguments = self.fit_arguments()
        del arguments["batch_size"]
        return self.model.fit(zoo.Batches(self.x, self.y, self.batch_rows), **arguments)


class OwnLoopAfterFit(Program):
    """optimizer.apply in a loop of the program's own after fit, on rows of a distributed dataset."""

    backends = ("torch",)
    metrics = ()

    def train(self) -> Any:
        import torch

        self.fit()
        rows = ms.data.from_arrays((self.x, self.y)).batch(self.batch_rows)
        for a, b in self.env.data(rows):
            self.model.zero_grad()
            output = self.model(torch.from_numpy(a), training=True)
            loss = torch.nn.functional.cross_entropy(output, torch.from_numpy(b))
            loss.backward()
            weights = self.model.trainable_weights
            with torch.no_grad():
                self.model.optimizer.apply([v.value.grad for v in weights], weights)


class StatesOfARank(Program):
    """A layer with float state that a rank without rows must not put back."""

    kinds = ("last", "empty")

    def build(self) -> Any:
        return self.model_of(zoo.StepCount(), keras.layers.Dense(8, "tanh"))
