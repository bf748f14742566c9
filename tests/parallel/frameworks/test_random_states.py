"""PyTorch's generator goes on from a checkpoint, so that dropout is that of an undisturbed run."""

import pytest

from mpistrat.train.checkpoints import get_states, set_states

torch = pytest.importorskip("torch")


@pytest.mark.ranks(1)
def test_torch_draws_what_it_had_drawn():
    torch.manual_seed(5)
    torch.rand(7)
    states = get_states()
    drawn = torch.nn.functional.dropout(torch.ones(100), 0.5)
    torch.manual_seed(6)
    set_states(states)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(100), 0.5), drawn)
