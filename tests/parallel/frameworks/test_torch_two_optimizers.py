"""Several optimizers over one module: the numbers of one process of plain torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.torch_training import difference, mlp  # noqa: E402

nn = torch.nn
STEPS = 5
pytestmark = pytest.mark.ranks(2)


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.made = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.judge = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, noise):
        return self.judge(self.made(noise))

    def judged(self, x):
        return self.judge(x)


def optimizers(module, rule):
    kind = torch.optim.Adafactor if rule == "Adafactor" else getattr(torch.optim, rule)
    return [torch.optim.SGD(module.made.parameters(), lr=0.1, momentum=0.9), kind(module.judge.parameters(), lr=0.01)]


def train(module, maker, judge, ranks, steps=range(STEPS)):
    for step in steps:
        data = [np.random.default_rng([step, rank]).normal(size=(4, 7)) for rank in ranks]
        both = torch.from_numpy(np.concatenate(data))
        noise, real = both[:, :3], both[:, 3:]
        judge.zero_grad()
        (module(noise).square().mean() + (module.judged(real) - 1).square().mean()).backward()
        judge.step()
        maker.zero_grad()  # which has gradients of the judge's loss
        (module(noise) - 1).square().mean().backward()
        maker.step()


@pytest.mark.parametrize("rule", ["AdamW", "Adafactor"])
def test_one_process_is_equalled_also_from_a_file(rule, tmp_path_factory):
    from mpi4py import MPI

    path = MPI.COMM_WORLD.bcast(str(tmp_path_factory.mktemp("two") / "state.h5"))
    reference = Gan().double()
    train(reference, *optimizers(reference, rule), range(2))
    for steps in (range(3), range(3, STEPS)):
        module = Gan().double()
        with ms.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                module, both = ms.torch.distribute(module, optimizers(module, rule))
            if steps[0]:
                strategy.restore(path)
            train(module, *both, [strategy.rank], steps)
            if steps[0]:
                assert difference(module.parameters(), reference.parameters()) < 1e-12
            else:
                strategy.save(path)


def test_what_several_optimizers_cannot_have_is_named():
    module = mlp()
    several = [torch.optim.SGD(module[0].parameters(), lr=0.1), torch.optim.SGD(module[2].parameters(), lr=0.1)]
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        for given, options, text in [
            ([several[0], several[0]], {}, "2 parameters that two have"),
            ([], {}, "got none"),
            (several, {"max_norm": 1.0}, "max_norm"),
            (several, {"overlap": True}, "overlap=True"),
        ]:
            with pytest.raises(ValueError, match=text):
                ms.torch.distribute(module, given, **options)
        ms.torch.distribute(module, several)
        with pytest.raises(ValueError, match="no optimizer has, got 1 that are not"):
            several[0].add_param_group({"params": [module[2].bias]})
    with ms.ParameterServerStrategy(num_ps=1) as strategy, strategy.scope():
        module = mlp()
        with pytest.raises(ValueError, match="parameter servers"):
            ms.torch.distribute(module, [torch.optim.SGD(module.parameters(), lr=0.1)])
