"""What Horovod's examples import of torchvision, without its files: digits that can be learned, and a small network."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

_PIXELS, _SQUARE = 28, 5


class _Digits(torch.utils.data.Dataset):
    """Noise with a bright square, whose place is the digit."""

    def __init__(self, root, train=True, download=False, transform=None):
        count = 1024 if train else 256
        generator = torch.Generator().manual_seed(int(train))
        self._digits = torch.randint(0, 10, (count,), generator=generator)
        self._images = 0.2 * torch.rand(count, 1, _PIXELS, _PIXELS, generator=generator)
        for image, digit in zip(self._images, self._digits.tolist(), strict=True):
            top, left = 4 + 13 * (digit // 5), 1 + _SQUARE * (digit % 5)
            image[0, top : top + _SQUARE, left : left + _SQUARE] += 0.8
        self._transform = transform

    def __len__(self):
        return len(self._digits)

    def __getitem__(self, row):
        return self._transform(self._images[row]), int(self._digits[row])


def _compose(parts):
    def call(image):
        for part in parts:
            image = part(image)
        return image

    return call


def _network():
    layers = [nn.Conv2d(3, 8, 7, stride=8), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 1000))


datasets = SimpleNamespace(MNIST=_Digits)
models = SimpleNamespace(resnet50=_network)
transforms = SimpleNamespace(
    Compose=_compose,
    ToTensor=lambda: lambda image: image,
    Normalize=lambda mean, std: lambda image: (image - mean[0]) / std[0],
)
