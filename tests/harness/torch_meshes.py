"""Two layers of torch, the first split by columns and the second by rows over a mesh, and the same in one process."""

import torch

LAYOUTS = {"first.weight": ("model", None), "first.bias": ("model",), "second.weight": (None, "model")}
EPOCHS, CLIP = 4, 0.1


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        return torch.from_numpy(mesh.all_reduce("SUM", x.detach().numpy(), mesh_axis="model"))

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.from_numpy(ctx.mesh.replicate_backward(gradient.contiguous().numpy(), mesh_axis="model")), None


class Pair(torch.nn.Module):
    """A layer that all ranks have, then the pair; without a mesh the pair in one process."""

    def __init__(self, mesh=None):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.first = torch.nn.Linear(10, 6).double(), torch.nn.Linear(6, 16).double()
        self.second, self.bias = (
            torch.nn.Linear(16, 3, bias=False).double(),
            torch.nn.Parameter(torch.zeros(3).double()),
        )
        self.mesh = mesh

    def forward(self, x):
        x = torch.tanh(self.before(x))
        inside = torch.tanh(self.first(x if self.mesh is None else Replicate.apply(x, self.mesh)))
        out = torch.nn.functional.linear(inside, self.second.weight)
        return (out if self.mesh is None else AllReduce.apply(out, self.mesh)) + self.bias


class Clipped:
    """An optimizer that scales gradients so that their norm is at most CLIP: torch's own function adds 1e-6 to the norm."""

    def __init__(self, optimizer):
        self.optimizer, self.zero_grad = optimizer, optimizer.zero_grad

    def step(self):
        gradients = [parameter.grad for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = sum((gradient**2).sum() for gradient in gradients).sqrt()
        for gradient in gradients:
            gradient.mul_(min(1.0, CLIP / norm))
        self.optimizer.step()
