"""optax's rules as optimizers of this package.

Elementwise rules run on blocks, on their owners, with state in the package's slots: see `reading`. Any other rule runs whole
on each rank after the sum, with state in variables of the strategy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..arena.reduction import BLOCK
from ..base.errors import explain
from ..base.types import Quality
from ..comm.arrays import accumulation_dtype, is_gpu
from ..optimizers import Optimizer
from ..optimizers.foreign import ForeignRule, WholeRule
from ..optimizers.rule import Block, UpdateRun
from ..optimizers.whole_state import StateArray, require_whole
from ..variables import Variable
from .arrays import flatten, is_array, is_parameter, memory_of, names_of, of_memory
from .reading import Mixes, Program, digest, read, word

__all__ = ["JaxRule"]

_SMALLEST = 1024  # elements of a block: each size is compiled once, so sizes are powers of two


@final
class JaxRule(ForeignRule):
    """optax's rule, as an optimizer of this package.

    Attributes:
        digest: of the rule's computation, which ranks compare: a transformation hides its settings.
    """

    _function = "ms.jax.distribute"
    _remedy = (
        "For a norm over all gradients pass max_norm= to ms.jax.distribute and leave clipping out of the chain; or take a rule "
        "that treats each number by itself, as optax.adamw"
    )
    _whole: JaxWholeRule | None

    def __init__(self, transformation: Any, tree: Any, limit: float | None) -> None:
        """Read the rule on a tree without the leaves that are not parameters.

        Raises:
            Exception: an error of the transformation on the tree.
        """
        leaves, structure = flatten(tree)
        forms = [
            jax.ShapeDtypeStruct(leaf.shape, accumulation_dtype(leaf.dtype)) if is_parameter(leaf) else None
            for leaf in leaves
        ]
        self.__blocks: _Blocks | None = None
        self._whole = None
        self.__places: dict[str, int] = {}  # of the parameters, by name of variable
        self.__variables: list[Variable] = []
        try:
            self.__blocks = _Blocks(transformation, structure.unflatten(forms))
        except Exception as error:  # of foreign code: plain optax reports what is wrong with it
            self._whole = JaxWholeRule(transformation, structure, forms, error)
        known = self.__blocks or self._whole
        assert known is not None
        self.digest = known.digest
        slots = {} if self.__blocks is None else self.__blocks.starts
        kind = (
            " on whole trees" if self._on_wholes else f" with {', '.join(slots)}" if slots else ""
        )  # which files compare
        super().__init__(
            1.0, slot_names=tuple(slots), slot_start=slots, global_clipnorm=limit, name=f"optax rule{kind}"
        )
        self.extra = ""  # a digest of the extra arguments of the step, which ranks compare

    def get_settings(self) -> list[dict[str, Any]]:
        """Return one group without settings: the transformation is code, which a file must not replace."""
        return [{}]

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Set the extra arguments of the next update.

        Raises:
            TypeError: the rule takes none, or has state that depends on optional ones; servers update parameters.
        """
        if self.__blocks is not None and not self.__blocks.take_extra(extra):
            extra = {}  # which the rule does not read
        if extra and self.__blocks is not None and self.__variables[0].placement.lacks(Quality.OWN_VARIABLES):
            expected, got = "no extra arguments for an update that servers compute", ", ".join(extra)
            raise TypeError(explain("ms.jax.apply", "optimizer", expected=expected, got=got))
        if self._whole is not None:
            self._whole.extra = extra
        words = (
            digest(*(f"{name} {word(leaf)}" for name in extra for leaf in jax.tree.leaves(extra[name])))
            if extra
            else ""
        )
        if words != self.extra:
            self.extra = words

    def serve(self, variables: Sequence[Variable]) -> None:
        """Start to update the variables of the tree's parameters, in their order. Collective.

        Raises:
            ValueError: a whole rule, and variables that are not whole on each node.
        """
        self.__variables = list(variables)
        self.__places = {variable.name: place for place, variable in enumerate(variables)}
        if self.__blocks is not None and self.__blocks.unequal and variables[0].placement.lacks(Quality.OWN_VARIABLES):
            rule = "an optimizer whose state starts with the weights"
            require_whole(self._function, variables, rule, self._remedy)
        super().serve(variables)

    @Optimizer.learning_rate.setter  # type: ignore[attr-defined]
    def learning_rate(self, value: Any) -> None:
        if value != 1:  # the neutral factor
            expected, got = "a schedule of optax in the transformation", f"learning_rate = {value!r}"
            remedy = "Or give ms.jax.apply one of ms.optimizers, whose rate may be set"
            raise ValueError(explain(self._function, "optimizer", expected=expected, got=got, remedy=remedy))
        Optimizer.learning_rate.fset(self, value)  # type: ignore[attr-defined]

    def _new_step(self, strategy: Any, pairs: Sequence[tuple[Any, Variable]]) -> UpdateRun:
        given = [variable for gradient, variable in pairs if gradient is not None]
        foreign = [variable.name for variable in given if variable.name not in self.__places]
        if foreign:
            expected, got = "a parameter of the tree that the optimizer was made for", "one of another tree"
            remedy = "params, optimizer = ms.jax.distribute(params, tx), of each tree"
            raise ValueError(explain("ms.jax.apply", foreign[0], expected=expected, got=got, remedy=remedy))
        names = {variable.name for variable in given}
        missing = [variable.name for variable in self.__variables if variable.name not in names]
        if self._whole is not None and missing:
            expected, got = f"gradients of the whole tree, as the optimizer has {self._whole.reason}", "no gradient"
            remedy = "Give parameters that stay as they are zeros, or an optimizer of their own"
            raise ValueError(explain("ms.jax.apply", missing[0], expected=expected, got=got, remedy=remedy))
        new: list[Variable] = []
        core = self._core
        if self.__blocks is not None and self.__blocks.unequal:
            known = set(map(id, core.variables))
            new = [v for v in given if id(v) not in known and v.name not in core.slots.pending]
            self.__begin(self.__blocks, new)
        try:
            step = super()._new_step(strategy, pairs)
        except BaseException:
            for variable in new:
                core.slots.pending.pop(variable.name, None)
            raise
        core.updated_first = list(dict.fromkeys([*core.updated_first, *new]))  # reset when a step fails
        return step

    def _on_restart(self, variables: Collection[Variable]) -> None:
        """Reset slots whose first values depend on weights."""
        if self.__blocks is None or not self.__blocks.unequal:
            return
        core, chosen = self._core, set(map(id, variables))
        begun = self.__blocks.unequal
        core.variables[:] = [v for v in core.variables if id(v) not in chosen or self.__places.get(v.name) not in begun]
        core.steps.clear()

    def get_state(self) -> dict[str, Any]:
        """Return `Optimizer.get_state`, with a whole rule's state under "whole". Collective."""
        state = super().get_state()
        return state if self._whole is None else {**state, "whole": self._whole.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set the result of `get_state`. Every rank must call it.

        Raises:
            ValueError: a whole rule's state for another rule, or vice versa.
        """
        if state["slots"] if self._on_wholes else "whole" in state:
            kinds = "the whole tree", "each number by itself"
            expected, got = (f"the state of a rule on {kind}" for kind in (kinds if self._on_wholes else kinds[::-1]))
            raise ValueError(explain("Optimizer.set_state", self.name, expected=expected, got=got))
        super().set_state(state)
        if self._whole is not None and "whole" in state:
            self._whole.set_state(state["whole"])

    def __begin(self, blocks: _Blocks, variables: Sequence[Variable]) -> None:
        """Create slots whose first values differ between elements. Collective."""
        for variable in variables:
            place = self.__places[variable.name]
            if place in blocks.unequal:
                begun = blocks.begin(place, _wide(variable).reshape(-1))
                self._core.slots.pending[variable.name] = {
                    name: array.reshape(variable.shape) for name, array in begun.items()
                }

    def _group_of(self, variable: Any) -> int:
        """Return the number of the variable's program."""
        return 0 if self.__blocks is None else self.__blocks.groups[self.__places[variable.name]]

    def _update_by_library(self, block: Block) -> None:
        assert self.__blocks is not None
        self.__blocks.update(block)


def _wide(variable: Variable) -> np.ndarray:
    return np.asarray(variable.array, accumulation_dtype(variable.dtype))


@final
class _Blocks:
    """A rule on blocks.

    Attributes:
        groups: the number of each parameter's program.
        starts: the slots' values before the first step, by name.
        unequal: the parameters with slots that start otherwise.
        digest: of the whole computation.
    """

    def __init__(self, transformation: Any, tree: Any) -> None:
        self._transformation, self._tree = transformation, tree
        reading = self._reading = read(transformation.init, transformation.update, tree)
        self._roles, self.digest = reading.free_state, digest(reading.text)
        self._programs: list[tuple[Program, Mapping[str, Any]]] = []
        known: dict[tuple[str, tuple[Any, ...]], int] = {}
        self.groups = []
        for program, kept in zip(reading.programs, reading.kept, strict=True):
            key = program.text, tuple(kept.items())
            if key not in known:
                known[key] = len(self._programs)
                self._programs.append((program, kept))
            self.groups.append(known[key])
        self.starts: dict[str, float] = {}
        for starts in reading.starts:
            for name, start in starts.items():
                self.starts.setdefault(name, 0.0 if start is None else start)
        self._initial = reading.initial
        self.unequal = {
            place
            for place, starts in enumerate(reading.starts)
            if any(start is None or start != self.starts[name] for name, start in starts.items())
        }
        self._plain = self._updates = [jax.jit(self._update_of(*each)) for each in self._programs]
        self._extra: list[Any] = []  # the numbers among the extra arguments that the updates read
        self._known_extra: tuple[Any, Any] = (None, self._plain)
        self._forms = reading.free_forms
        self._first = [_strong(x, form) for x, form in zip(reading.first({}), self._forms, strict=True)]
        self._next_free, self._advance = reading.next_free, jax.jit(self._advanced)
        self._free: dict[int, list[Any]] = {}  # by the step that it is for

    def take_extra(self, extra: Mapping[str, Any]) -> bool:
        """Set the extra arguments of the next update; return whether it reads any.

        Raises:
            TypeError: the rule does not take these arguments, or they mix elements.
        """
        leaves, structure = jax.tree.flatten(dict(extra))
        numbers = [leaf for leaf in leaves if _is_number(leaf)]
        fixed = [None if _is_number(leaf) else leaf for leaf in leaves]  # as functions
        key = structure, fixed, [(type(leaf), np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in numbers]
        if not extra:
            self._updates = self._plain
        elif self._known_extra[0] == key:
            self._updates = self._known_extra[1]
        else:
            self._updates = self._read_with(structure, leaves, ", ".join(extra))
            self._known_extra = key, self._updates
        reads = self._updates is not self._plain
        self._extra = list(map(jnp.asarray, numbers)) if reads else []
        return reads

    def _read_with(self, structure: Any, leaves: Sequence[Any], names: str) -> list[Any]:
        """Return the updates of all programs with extra arguments, or the known ones without reads."""

        def update(grads: Any, state: Any, params: Any, *numbers: Any) -> Any:
            left = iter(numbers)
            given = structure.unflatten([next(left) if _is_number(leaf) else leaf for leaf in leaves])
            return self._transformation.update(grads, state, params, **given)

        got, expected = names, "extra arguments that the optimizer's update takes"
        before = self._reading
        try:
            reading = read(self._transformation.init, update, self._tree, list(filter(_is_number, leaves)))
        except Exception as error:  # of foreign code
            got = f"{names} ({type(error).__name__}: {error})"
            raise TypeError(explain("ms.jax.apply", "optimizer", expected=expected, got=got)) from error
        if reading.text == before.text:
            return self._plain
        programs: dict[int, Program] = {}
        alike = [
            programs.setdefault(group, program).text == program.text
            for group, program in zip(self.groups, reading.programs, strict=True)
        ]
        if reading.next_free.text != before.next_free.text or reading.kept != before.kept or not all(alike):
            expected = (
                "extra arguments that no count, rate or choice of parameters depends on, where an update may lack them"
            )
            remedy = "Give the update an argument without a default, so that it runs whole"
            raise TypeError(explain("ms.jax.apply", "optimizer", expected=expected, got=got, remedy=remedy))
        return [jax.jit(self._update_of(programs[group], kept)) for group, (_, kept) in enumerate(self._programs)]

    def begin(self, place: int, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Return all slots of a parameter before its first step."""
        found = {name: np.full(weights.shape, start, weights.dtype) for name, start in self.starts.items()}
        for name, program in self._initial[place].items():
            found[name] = np.asarray(program({"weights": jnp.asarray(weights)}, weights.size)[0]).astype(weights.dtype)
        return found

    def update(self, block: Block) -> None:
        """Update a block."""
        size = block.weights.size
        on_gpu = is_gpu(block.weights)  # there a block is the whole variable
        padded = size if on_gpu else min(BLOCK, max(_SMALLEST, 1 << (size - 1).bit_length()))
        slots = [block.slots[name] for name in self._programs[block.group][1]]
        arrays = [block.weights, block.gradient, *slots]
        if padded != size:  # with the last element, for which the rule computes no NaN that jax_debug_nans would report
            arrays = [np.concatenate([array, np.full(padded - size, array[-1], array.dtype)]) for array in arrays]
        if on_gpu:
            arrays = list(map(of_memory, arrays))
        results = self._updates[block.group](arrays[0], arrays[1], arrays[2:], self._free_of(block.step), self._extra)
        for target, result in zip([block.weights, *slots], jax.block_until_ready(results), strict=True):
            target[...] = memory_of(result, target)[:size]

    def _update_of(self, program: Program, kept: Mapping[str, Any]) -> Any:
        def update(
            weights: Any, gradient: Any, slots: Sequence[Any], free: Sequence[Any], extra: Sequence[Any]
        ) -> list[Any]:
            inputs = {"weights": weights, "gradient": gradient, **dict(zip(self._roles, free, strict=True))}
            inputs.update((f"extra {number}", value) for number, value in enumerate(extra))
            for (name, dtype), slot in zip(kept.items(), slots, strict=True):
                inputs[f"slot {name}"] = slot.astype(dtype)
            return [result.astype(weights.dtype) for result in program(inputs, weights.size)]

        return update

    def _free_of(self, step: int) -> list[Any]:
        """Return the rule's state that all elements share, before a step."""
        known = self._free
        if step not in known:
            first = step - 1 if step - 1 in known else 1
            before = known.get(first, self._first)
            self._free = known = {first: before, step: self._advance(before, step - first)}
        return known[step]

    def _advanced(self, free: Sequence[Any], steps: Any) -> Any:
        def once(_: Any, before: list[Any]) -> list[Any]:
            after = self._next_free(dict(zip(self._roles, before, strict=True)))
            return [_strong(x, form) for x, form in zip(after, self._forms, strict=True)]

        return jax.lax.fori_loop(0, steps, once, list(free))


def _is_number(leaf: Any) -> bool:
    """Return whether an extra argument, an array or a number, can be traced."""
    return is_array(leaf) or type(leaf) in (int, float)


def _strong(value: Any, form: Any) -> Any:
    """Return an array of a form, with that form's dtype."""
    if jax.dtypes.issubdtype(form.dtype, jax.dtypes.extended):
        return value
    return jnp.broadcast_to(jnp.asarray(value, form.dtype), form.shape)


@final
class JaxWholeRule(WholeRule):
    """A rule on the whole tree.

    Attributes:
        digest: of the whole computation; "" if it cannot be traced.
        extra: the extra arguments of the next update.
    """

    def __init__(self, transformation: Any, structure: Any, forms: Sequence[Any], error: Exception) -> None:
        self._transformation, self._tree = transformation, structure
        self._chosen = [index for index, form in enumerate(forms) if form is not None]
        tree = structure.unflatten(forms)
        self.digest = ""
        self.extra: Mapping[str, Any] = {}
        self._variables: list[Variable] = []
        self._state: list[_StateLeaf] = []
        self._structure: Any = None
        self._then: list[Any] = []
        self._forms: list[Any] | None = None
        self._update = self._step
        self.reason = _reason(error)
        self.title = f"an optimizer with {self.reason}"
        if _needs_extra(error):
            self._update = jax.jit(self._step)
            return
        try:
            state = jax.eval_shape(transformation.init, tree)
            closed, (_, after) = jax.make_jaxpr(self._step, return_shape=True)(tree, tree, state)
            self.digest = digest(word(closed), word(jax.make_jaxpr(transformation.init)(tree)))
            self._forms = jax.tree.leaves(after)
            if jax.tree.structure(after) != jax.tree.structure(state):
                self._forms = None
            self._update = jax.jit(self._step)
        except Exception:  # it may run without tracing: plain optax decides
            zeros = structure.unflatten([None if form is None else jnp.zeros(form.shape, form.dtype) for form in forms])
            with jax.debug_nans(False), jax.debug_infs(False):  # zeros are not the user's gradients
                self._step(zeros, zeros, transformation.init(zeros))

    def _step(self, params: Any, grads: Any, state: Any, **extra: Any) -> tuple[Any, Any]:
        updates, state = self._transformation.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    def _of_parameters(self, arrays: Sequence[Any]) -> Any:
        """Return a tree with these arrays for its parameters."""
        leaves: list[Any] = [None] * self._tree.num_leaves
        for index, array in zip(self._chosen, arrays, strict=True):
            leaves[index] = array
        return self._tree.unflatten(leaves)

    def begin(self, variables: Sequence[Variable]) -> None:
        """Create the variables of the state. Collective."""
        self._variables = list(variables)
        state = self._transformation.init(self._of_parameters(list(map(_wide, variables))))
        leaves, self._structure = jax.tree.flatten(state)
        forms = self._forms or leaves
        self._state = [
            _StateLeaf(name, leaf, form) for name, leaf, form in zip(_names(state), leaves, forms, strict=True)
        ]

    def update(self, gradients: Mapping[str, Any], weights: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return new weights by name of variable; all arrays are whole. `store` writes the state."""
        empty = {v.name: np.zeros(v.shape, accumulation_dtype(v.dtype)) for v in self._variables if not v.size}
        params, grads = (
            self._of_parameters([found[variable.name] for variable in self._variables])
            for found in ({**weights, **empty}, {**gradients, **empty})
        )
        extra, state = self.extra, self._structure.unflatten([each.read() for each in self._state])
        traced = all(isinstance(leaf, bool) or _is_number(leaf) for leaf in jax.tree.leaves(extra))
        update = self._update if traced else self._step  # a function cannot be an argument of a traced one
        params, state = jax.block_until_ready(update(params, grads, state, **extra))
        self._then, structure = jax.tree.flatten(state)
        if structure != self._structure:
            raise RuntimeError(explain("ms.jax.apply", "optimizer", expected=f"state {self._structure}", got=structure))
        after, _ = flatten(params)
        return {v.name: after[index] for v, index in zip(self._variables, self._chosen, strict=True)}

    def get_state(self) -> dict[str, np.ndarray]:
        """Return copies of the state's arrays, by name."""
        arrays = [each.array for each in self._state if each.array is not None]
        return {array.variable.name: array.variable.numpy() for array in arrays}

    def set_state(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays that `get_state` returned. Collective."""
        for each in self._state:
            if each.array is not None and each.array.variable.name in arrays:
                each.array.variable.assign(arrays[each.array.variable.name])

    def new_state(self) -> Iterator[tuple[StateArray, np.ndarray]]:
        """Yield the arrays of the state with their values after the last update."""
        values, self._then = self._then, []
        for each, value in zip(self._state, values, strict=True):
            if each.array is None:
                each.value = value
            else:
                yield each.array, each.numbers_of(value)


def _reason(error: Exception) -> str:
    """Return why a rule does not run on blocks, given the error of reading it."""
    if _needs_extra(error):
        return "an update with arguments of its own"
    if isinstance(error, Mixes):
        return f"an update of numbers that depends on others, through {error}"
    return f"an update that cannot be traced ({type(error).__name__})"


def _needs_extra(error: Exception) -> bool:
    """Return whether an update was called without an argument that it needs."""
    return isinstance(error, TypeError) and "missing" in str(error) and "argument" in str(error)


def _names(tree: Any) -> list[str]:
    return [name for name, leaf in zip(names_of(tree), flatten(tree)[0], strict=True) if leaf is not None]


@final
class _StateLeaf:
    """A leaf of a rule's state: an array of numbers in a variable, and so in files; or any other value.

    Attributes:
        array: None for a value that is not an array of numbers.
        value: that value.
    """

    def __init__(self, name: str, value: Any, form: Any) -> None:
        self.value, self._kind = value, None
        self.array: StateArray | None = None
        if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            self._kind, value = jax.random.key_impl(value), jax.random.key_data(value)
        elif not isinstance(value, (bool, int, float, np.ndarray, np.generic, jax.Array)):
            return
        else:
            value = jnp.asarray(value, getattr(form, "dtype", None))
        self._dtype = value.dtype
        self.array = StateArray(f"optax/{name}", np.asarray(value))

    def read(self) -> Any:
        """Return the leaf."""
        if self.array is None:
            return self.value
        value = jnp.asarray(self.array.variable.array, self._dtype)
        return value if self._kind is None else jax.random.wrap_key_data(value, impl=self._kind)

    def numbers_of(self, value: Any) -> np.ndarray:
        """Convert a new value of the leaf to an array of numbers."""
        return np.asarray(value if self._kind is None else jax.random.key_data(value))
