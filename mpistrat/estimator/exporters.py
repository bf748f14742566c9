"""Exporters: which of the evaluated models are written as files for other programs, and which of them stay."""

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from ..base.errors import explain

__all__ = ["BestExporter", "Exporter", "FinalExporter", "LatestExporter"]

_BEST = "best.json"


class Exporter(ABC):
    """Decides after an evaluation whether the model is exported.

    Attributes:
        name: of its folder, `export/NAME` in the model's.
    """

    def __init__(self, name: str) -> None:
        if not name or "/" in name:
            raise ValueError(explain(type(self).__name__, "name", expected="the name of a folder", got=repr(name)))
        self.name = name

    @abstractmethod
    def export(
        self,
        estimator: Any,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | os.PathLike[str],
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Path | None:
        """Export the model as it is now, or not. Collective over the ranks that evaluate.

        Args:
            estimator: the Estimator; call its `export`.
            export_path: the folder.
            checkpoint_path: the file that was evaluated; in place it may be written still.
            eval_result: the results, with "global_step"; the same on all ranks.
            is_the_final_export: whether training has ended.

        Returns:
            The file; None where none was written.
        """


@final
class FinalExporter(Exporter):
    """Exports once, when training has ended."""

    def __init__(self, name: str = "final") -> None:
        super().__init__(name)

    def export(
        self,
        estimator: Any,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | os.PathLike[str],
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Path | None:
        return _write(estimator, export_path, eval_result, 0) if is_the_final_export else None


@final
class LatestExporter(Exporter):
    """Exports after each evaluation, and keeps the newest files."""

    def __init__(self, name: str = "latest", exports_to_keep: int = 5) -> None:
        super().__init__(name)
        self._keep = exports_to_keep

    def export(
        self,
        estimator: Any,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | os.PathLike[str],
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Path | None:
        return _write(estimator, export_path, eval_result, self._keep)


@final
class BestExporter(Exporter):
    """Exports after an evaluation that is better than all before, in earlier runs, too."""

    def __init__(
        self,
        name: str = "best_exporter",
        compare_fn: Callable[[Mapping[str, Any], Mapping[str, Any]], bool] | None = None,
        exports_to_keep: int = 5,
    ) -> None:
        """Compare.

        Args:
            name: of its folder.
            compare_fn: whether the second results, of now, are better than the first, the best ones; default: a smaller "loss".
            exports_to_keep: how many of the best stay; 0 for all.
        """
        super().__init__(name)
        self._better, self._keep = compare_fn or _smaller_loss, exports_to_keep

    def export(
        self,
        estimator: Any,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | os.PathLike[str],
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Path | None:
        strategy, best = estimator.strategy, Path(export_path) / _BEST
        text = best.read_text() if strategy.rank == 0 and best.exists() else ""
        text = strategy.broadcast_object(text)
        if text and not self._better(json.loads(text), eval_result):
            return None
        path = _write(estimator, export_path, eval_result, self._keep)
        if strategy.rank == 0:
            best.write_text(json.dumps({name: _number(value) for name, value in eval_result.items()}))
        return path


def _smaller_loss(best: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if "loss" not in now:
        text = explain(
            "BestExporter", "compare_fn", expected="a function, where no result is called loss", got=", ".join(now)
        )
        raise ValueError(text)
    return bool(now["loss"] < best["loss"])


def _number(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _write(estimator: Any, folder: str | os.PathLike[str], result: Mapping[str, Any], keep: int) -> Path:
    path = Path(folder) / f"step-{result['global_step']:010}.safetensors"
    if estimator.strategy.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
    estimator.export(path)
    if keep and estimator.strategy.rank == 0:
        for old in sorted(path.parent.glob("step-*.safetensors"))[:-keep]:
            with contextlib.suppress(OSError):
                old.unlink()
    return path
