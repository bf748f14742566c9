"""The strategy that the environment names, with the settings of the call."""

import pytest

import mpistrat as ms


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("MPISTRAT_STRATEGY", "MPISTRAT_NUM_PS", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("one_device", ms.OneDeviceStrategy),
        ("mirrored", ms.MirroredStrategy),
        ("multi_worker_mirrored", ms.MultiWorkerMirroredStrategy),
        ("central_storage", ms.CentralStorageStrategy),
    ],
)
def test_each_name_makes_its_strategy(monkeypatch, name, kind):
    monkeypatch.setenv("MPISTRAT_STRATEGY", name)
    strategy = ms.strategy_from_environment(default="parameter_server")
    assert type(strategy) is kind
    strategy.close()


def test_the_default_and_the_settings_hold():
    strategy = ms.strategy_from_environment(devices=["cpu:0", "cpu:1"])
    assert type(strategy) is ms.MultiWorkerMirroredStrategy
    assert strategy.num_replicas_in_sync == 2
    strategy.close()


def test_wrong_use_is_explained(monkeypatch):
    with pytest.raises(ValueError, match=r"default: expected one of one_device, .*got 'horovod'"):
        ms.strategy_from_environment(default="horovod")
    with pytest.raises(ValueError, match=r"got 'mesh'. Call ms.MeshStrategy\(axes="):
        ms.strategy_from_environment(default="mesh")
    monkeypatch.setenv("MPISTRAT_STRATEGY", "mesh")
    with pytest.raises(ValueError, match=r"MPISTRAT_STRATEGY: .*got 'mesh'. Call ms.MeshStrategy\(axes="):
        ms.strategy_from_environment()
    monkeypatch.delenv("MPISTRAT_STRATEGY")
    monkeypatch.setenv("MPISTRAT_NUM_PS", "1")
    with pytest.raises(
        ValueError, match="MPISTRAT_NUM_PS: expected a strategy with servers, got 1, and the strategy is"
    ):
        ms.strategy_from_environment()
    monkeypatch.delenv("MPISTRAT_NUM_PS")
    monkeypatch.setenv("MPISTRAT_STRATEGY", "mirrored")
    with pytest.raises(
        TypeError, match=r"max_staleness: expected a setting of MirroredStrategy \(MPISTRAT_STRATEGY\): dev"
    ):
        ms.strategy_from_environment(max_staleness=1)
