"""Which functions travel to ranks whole: those of modules that an import would not find there."""

from __future__ import annotations

import functools
import sys
import types
from importlib.machinery import ModuleSpec

import pytest

from mpistrat.launcher.multi_process_runner import _sent_whole

cloudpickle = pytest.importorskip("cloudpickle")


class Finder:
    """As an installation that is to be edited puts one into sys.meta_path."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "hidden_package" else None


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> object:
    module = types.ModuleType("hidden_package")
    exec("def function(): return 1", module.__dict__)
    monkeypatch.setitem(sys.modules, "hidden_package", module)
    return module.function


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: functools.partial(functools.partial(f))])
def test_a_module_on_no_path_is_sent_only_for_this_call(function, wrap) -> None:
    with _sent_whole([wrap(function), 3, None], cloudpickle):
        assert "hidden_package" in cloudpickle.list_registry_pickle_by_value()
    assert "hidden_package" not in cloudpickle.list_registry_pickle_by_value()


def test_what_the_user_has_registered_stays(function) -> None:
    module = sys.modules["hidden_package"]
    cloudpickle.register_pickle_by_value(module)
    with _sent_whole([function], cloudpickle):
        pass
    assert "hidden_package" in cloudpickle.list_registry_pickle_by_value()
    cloudpickle.unregister_pickle_by_value(module)


def test_a_package_that_is_installed_to_be_edited_is_imported_by_ranks(function, monkeypatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    with _sent_whole([function, print, len], cloudpickle):
        assert not cloudpickle.list_registry_pickle_by_value()
