"""optax's rules on blocks of weights, as an optimizer of ours.

A rule that treats each number by itself may update any block of any parameter apart, by the rank that owns it, with state that
lies in our slots. Whether a rule does is found by trying it: cut in two, a few numbers must come out as they do whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..comm.arrays import is_gpu
from ..cross_device.arena import BLOCK
from ..errors import explain
from ..optimizers import Optimizer
from ..optimizers.rule import Block
from .arrays import flatten, is_parameter, memory_of, names_of, of_memory

__all__ = ["JaxRule"]

_SMALLEST = 1024  # elements of a block: each size is compiled once, so sizes are powers of two
_SCALES = (1.0, 1.0, 1e6, 1e-3)  # of the gradients of a trial's steps: a limit of any norm is passed


@final
class JaxRule(Optimizer):
    """optax's rule, as an optimizer of ours.

    Attributes:
        trial: numbers that came out of a trial, which ranks compare, since a transformation does not show its settings.
    """

    def __init__(self, transformation: Any, tree: Any, limit: float | None) -> None:
        self.__state = _State(transformation)
        self.trial = _try(self.__state, tree)
        super().__init__(1.0, slot_names=self.__state.names, slot_start=self.__state.start, global_clipnorm=limit)
        self.__scalars: dict[int, list[Any]] = {}  # by the step that they are for

    @Optimizer.learning_rate.setter  # type: ignore[attr-defined]
    def learning_rate(self, value: Any) -> None:
        if value != 1:  # what nothing is multiplied by
            expected, got = "a schedule of optax in the transformation", f"learning_rate = {value!r}"
            remedy = "Or give ms.jax.apply one of ms.optimizers, whose rate may be set"
            raise ValueError(explain("ms.jax.distribute", "optimizer", expected=expected, got=got, remedy=remedy))
        Optimizer.learning_rate.fset(self, value)  # type: ignore[attr-defined]

    def update(self, *_: Any) -> None:
        """Not called: see `update_block`."""
        raise NotImplementedError("JaxRule.update")

    def update_block(self, block: Block) -> None:
        """Update a block by optax."""
        size = block.weights.size
        on_gpu = is_gpu(block.weights)  # there a block is the whole variable
        padded = size if on_gpu else min(BLOCK, max(_SMALLEST, 1 << (size - 1).bit_length()))
        slots = [block.slots[name] for name in self.__state.names]
        arrays = [block.weights, block.gradient, *slots]
        if padded != size:
            arrays = [np.concatenate([array, np.zeros(padded - size, array.dtype)]) for array in arrays]
        if on_gpu:
            arrays = list(map(of_memory, arrays))
        results = self.__state.update(arrays[0], arrays[1], arrays[2:], self._scalars_of(block.step))
        for target, result in zip([block.weights, *slots], jax.block_until_ready(results), strict=True):
            target[...] = memory_of(result, target)[:size]

    def _scalars_of(self, step: int) -> list[Any]:
        """Return what the rule keeps once for all elements, as it is before a step."""
        known = self.__scalars
        if step not in known:
            first = step - 1 if step - 1 in known else 1
            before = known.get(first, self.__state.first_scalars)
            self.__scalars = known = {first: before, step: self.__state.advance(before, step - first)}
        return known[step]


@final
class _State:
    """The state of a transformation on a flat vector: arrays like it, which are slots, and scalars.

    Attributes:
        names: of the slots.
        start: their value before the first step.
        first_scalars: the scalars before the first step.

    Raises:
        TypeError: state of another form.
    """

    def __init__(self, transformation: Any) -> None:
        self.transformation = transformation
        some = np.arange(5, dtype=_float())
        state = transformation.init(jnp.asarray(some))
        leaves, self._structure = flatten(state)
        names = names_of(state)
        self._is_slot = [np.shape(leaf) == some.shape for leaf in leaves]
        for leaf, name, slot in zip(leaves, names, self._is_slot, strict=True):
            if not slot and np.shape(leaf) != ():
                _refuse(f"state {name} of shape {np.shape(leaf)} for {some.size} numbers")
        slots = [(name, leaf) for leaf, name, slot in zip(leaves, names, self._is_slot, strict=True) if slot]
        self._dtypes = [None if leaf.dtype == some.dtype else leaf.dtype for _, leaf in slots]
        self.names = tuple(name.replace("/", ".") for name, _ in slots)
        starts = {float(number) for _, leaf in slots for number in np.asarray(leaf, np.float64)}
        if len(starts) > 1:
            _refuse(f"state that begins with several numbers, {sorted(starts)[:3]}")
        self.start = starts.pop() if starts else 0.0
        self.first_scalars = [leaf for leaf, slot in zip(leaves, self._is_slot, strict=True) if not slot]
        self.update, self.advance = jax.jit(self._update), jax.jit(self._advance)

    def _join(self, slots: Sequence[Any], scalars: Sequence[Any]) -> Any:
        left = iter(slots if not any(self._dtypes) else self._cast(slots)), iter(scalars)
        return self._structure.unflatten([next(left[not slot]) for slot in self._is_slot])

    def _cast(self, slots: Sequence[Any]) -> list[Any]:
        return [slot if dtype is None else slot.astype(dtype) for slot, dtype in zip(slots, self._dtypes, strict=True)]

    def step(self, weights: Any, gradient: Any, slots: Sequence[Any], scalars: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return weights, slots and scalars after a step."""
        updates, state = self.transformation.update(gradient, self._join(slots, scalars), weights)
        leaves = list(zip(flatten(state)[0], self._is_slot, strict=True))
        kept = [leaf.astype(weights.dtype) for leaf, slot in leaves if slot]
        return optax.apply_updates(weights, updates), kept, [leaf for leaf, slot in leaves if not slot]

    def _update(self, weights: Any, gradient: Any, slots: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        weights, slots, _ = self.step(weights, gradient, slots, scalars)
        return [weights, *slots]

    def _advance(self, scalars: Sequence[Any], steps: Any) -> Any:
        zeros = jnp.zeros(1, _float())
        slots = [jnp.full(1, self.start, _float())] * len(self.names)
        return jax.lax.fori_loop(0, steps, lambda _, before: self.step(zeros, zeros, slots, before)[2], list(scalars))


def _try(state: _State, tree: Any) -> list[float]:
    """Take a few steps with a small tree like the parameters', whole and cut in two; return the numbers that came out.

    Raises:
        TypeError: others come out.
    """
    leaves, structure = flatten(tree)
    shapes = [tuple(min(n, 3) for n in leaf.shape) if is_parameter(leaf) and leaf.size else None for leaf in leaves]
    rng = np.random.default_rng(0)
    whole = structure.unflatten([None if shape is None else jnp.asarray(_draw(rng, shape)) for shape in shapes])
    halves = [half for half in np.array_split(_flat(whole), 2) if half.size]
    try:
        their_state = state.transformation.init(whole)
        ours = [(jnp.asarray(h), [jnp.full(h.shape, state.start, h.dtype) for _ in state.names]) for h in halves]
        scalars = list(state.first_scalars)
        for number, scale in enumerate((*_SCALES, np.nan)):
            gradient = _draw(rng, _flat(whole).shape)
            gradient *= scale if np.isfinite(scale) else 1
            if not np.isfinite(scale):
                gradient[0] = np.nan
            updates, their_state = state.transformation.update(_like(whole, gradient), their_state, whole)
            whole = optax.apply_updates(whole, updates)
            parts = np.array_split(gradient, 2)
            after = [state.step(w, jnp.asarray(g), s, scalars) for (w, s), g in zip(ours, parts, strict=False)]
            ours = [(weights, slots) for weights, slots, _ in after]
            next_scalars = state.advance(scalars, 1)
            for _, _, theirs in after:
                if not all(map(_same, theirs, next_scalars)):
                    _refuse("state that depends on all numbers together")
            scalars = next_scalars
            got = np.concatenate([np.asarray(weights) for weights, _ in ours])
            if not np.allclose(got, _flat(whole), rtol=1e-4, atol=1e-6, equal_nan=True):
                _refuse(
                    f"one that updates numbers otherwise when the tree is cut into blocks (found in trial {number})"
                )
            if number == len(_SCALES) - 1:
                trial = [float(f"{n:.4g}") for n in got[:8]]
    except (ValueError, KeyError, AttributeError) as error:
        _refuse(f"one whose update needs the tree itself ({type(error).__name__}: {str(error)[:120]})")
    return trial


def _same(a: Any, b: Any) -> bool:
    """Whether scalars are alike but for the last bits, in which a compiled function may differ from another."""
    return np.allclose(a, b, rtol=1e-5, equal_nan=True) if is_parameter(a) else bool(np.array_equal(a, b))


def _float() -> Any:
    return jnp.result_type(float)  # float64 where JAX has it enabled


def _draw(rng: Any, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape), _float())


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)])


def _like(tree: Any, flat: np.ndarray) -> Any:
    sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
    parts = iter(np.split(flat, np.cumsum(sizes)[:-1]))
    return jax.tree.map(lambda leaf: jnp.asarray(next(parts)).reshape(leaf.shape), tree)


def _refuse(got: str) -> NoReturn:
    expected = "an optax transformation that treats each number by itself, the same in all parameters"
    remedy = (
        "For a norm over all gradients pass max_norm= to ms.jax.distribute and leave clipping out of the chain; give parameters "
        "that are treated otherwise, as by a mask, an optimizer of their own: ms.jax.distribute and apply take parts of a tree; "
        "or take one of ms.optimizers"
    )
    raise TypeError(explain("ms.jax.distribute", "optimizer", expected=expected, got=got, remedy=remedy))
