"""What a rank prints when an exception ends the job: the user's lines, and this package's only where they tell something."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.base import nest
from mpistrat.base.environment import Environment
from mpistrat.comm.monitor.abort import format_exception, is_user_code


def printed(act) -> str:
    try:
        act()
    except Exception:
        return format_exception(*sys.exc_info())
    raise AssertionError("nothing was raised")


@pytest.fixture
def in_the_step():
    with ms.OneDeviceStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(3), name="w")
        optimizer = ms.optimizers.SGD(0.1)

        def run(gradient):
            strategy.run(lambda: optimizer.apply_gradients([(gradient(), w)]))

        yield run


def test_an_error_on_purpose_has_the_user_s_lines_only(in_the_step, monkeypatch):
    text = printed(lambda: in_the_step(lambda: np.ones(4)))
    assert "test_abort.py" in text
    assert "/mpistrat/optimizers/" not in text
    assert (
        text.rstrip().splitlines()[-2].startswith("ValueError: apply_gradients: w: expected a gradient of shape (3,)")
    )
    assert "MPISTRAT_TRACEBACK=full" in text
    monkeypatch.setenv("MPISTRAT_TRACEBACK", "full")
    text = printed(lambda: in_the_step(lambda: np.ones(4)))
    assert "/mpistrat/optimizers/gradients.py" in text
    assert "left out" not in text


def test_an_error_of_the_user_s_own_function_below_ours(in_the_step):
    def gradient():
        raise KeyError("mine")

    text = printed(lambda: in_the_step(gradient))
    assert "in gradient" in text
    assert "/mpistrat/strategy/" not in text


def test_an_error_that_nobody_meant_keeps_all_lines():
    text = printed(lambda: nest.map_structure(5, [1]))
    assert "/mpistrat/base/nest.py" in text
    assert "left out" not in text


@pytest.mark.parametrize(
    ("filename", "whose"),
    [
        ("/home/me/project/train.py", True),
        ("/home/me/site-packages.py", True),
        ("<stdin>", True),
        (np.__file__, False),
        (sys.modules["functools"].__file__, False),
        ("/apps/torch/2.13/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", False),
        ("/home/me/.local/lib/python3.11/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/numpy/__init__.py", False),
        ("C:\\Python\\Lib\\site-packages\\jax\\api.py", False),
    ],
)
def test_installed_packages_are_not_the_user_s_code(filename, whose):
    """A module of the site, a user's folder and an environment below this one have folders of their own."""
    assert is_user_code(filename) == whose


def test_packages_in_a_folder_of_sys_path_are_not_the_user_s_code(tmp_path, monkeypatch):
    """As `pip install --target` puts them, and PYTHONPATH finds them; programs have no metadata beside them."""
    packages, programs = tmp_path / "packages", tmp_path / "programs"
    (packages / "torch-2.13.0.dist-info").mkdir(parents=True)
    programs.mkdir()
    inside = packages / "programs"
    for folder in (packages, programs, inside):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend("")
    assert not is_user_code(str(packages / "torch" / "distributed" / "c10d.py"))
    assert is_user_code(str(programs / "train.py"))
    assert is_user_code(str(inside / "train.py"))
    assert is_user_code(f"{packages}.py")


def test_a_misspelt_name_is_answered_with_the_nearest_one():
    """As the interpreter itself does where it prints an exception."""
    assert "Did you mean: 'MirroredStrategy'?" in printed(lambda: ms.MiroredStrategy)
    assert "Did you mean: 'printed'?" in printed(lambda: prnted)  # noqa: F821
    assert "attribute 'nothing_like_it_xyz'\n" in printed(lambda: ms.nothing_like_it_xyz)


def test_causes_are_folded_too(in_the_step):
    def act():
        try:
            in_the_step(lambda: np.ones(4))
        except ValueError as error:
            raise RuntimeError("training failed") from error

    text = printed(act)
    assert "direct cause" in text
    assert "/mpistrat/optimizers/" not in text


def test_a_wrong_setting_is_no_reason_to_say_nothing(monkeypatch):
    monkeypatch.setenv("MPISTRAT_TRACEBACK", "long")
    assert "ValueError: environment: MPISTRAT_TRACEBACK" in printed(lambda: Environment.read())
