"""The shapes of GPT-2's parameters, of the model with 124 million: for steps of an optimizer without the model."""

from __future__ import annotations

_LAYER = [
    (768,), (768,), (768, 2304), (2304,), (768, 768), (768,),
    (768,), (768,), (768, 3072), (3072,), (3072, 768), (768,),
]  # fmt: skip
GPT2: list[tuple[int, ...]] = [(50257, 768), (1024, 768), *_LAYER * 12, (768,), (768,)]
