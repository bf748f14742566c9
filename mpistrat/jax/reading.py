"""Reading of a transformation of optax: its computation per element, from its jaxpr on a tree.

`read` follows every value to the results. There are three kinds: free values, computed from no element of a leaf, as a count
or a rate; uniform ones, a free number broadcast to a leaf's shape; and arrays of elements of one leaf, where each element
only depends on elements with the same index. If all values are such, the rule of a leaf is a small program for any range of
its elements, which contains masks, labels and schedules as found on the whole tree. Otherwise `Mixes` names the operation
that mixes elements.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

__all__ = ["Mixes", "Program", "Reading", "digest", "read", "word"]

Kind = Literal["free", "uniform", "element"]
_ELEMENTWISE = frozenset([
    "add", "add_any", "sub", "mul", "div", "rem", "max", "min", "neg", "sign", "abs", "floor", "ceil", "round",
    "exp", "exp2", "log", "log1p", "expm1", "sqrt", "rsqrt", "cbrt", "square", "tanh", "logistic", "sin", "cos",
    "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "atan2", "pow", "integer_pow",
    "select_n", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "xor", "shift_left", "shift_right_logical",
    "shift_right_arithmetic", "is_finite", "convert_element_type", "copy", "copy_p", "erf", "erfc", "erf_inv",
    "lgamma", "digamma", "nextafter", "clamp", "reduce_precision", "stop_gradient", "real", "imag", "conj",
])  # fmt: skip
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
_RESHAPES = ("broadcast_in_dim", "reshape", "squeeze")
_numbers = itertools.count()


class Mixes(Exception):
    """A rule in which an element's update depends on others; the text names the operation."""


@final
class _Value:
    """A value of a program, and its computation.

    Attributes:
        kind, leaf: its kind, and the leaf of an array of elements.
        shape, dtype: in the tree.
        role: the name of an input; "" for a computed value.
        value: of a constant.
        primitive, params, inputs, index: the operation, and the index of the value among its results.
        source: equal for the results of one operation.
    """

    __slots__ = (
        "dtype", "index", "inputs", "kind", "leaf", "number", "params", "primitive", "role", "shape", "source", "value",
    )  # fmt: skip

    def __init__(
        self,
        kind: Kind,
        aval: Any,
        *,
        leaf: int | None = None,
        role: str = "",
        value: Any = None,
        primitive: Any = None,
        params: Mapping[str, Any] | None = None,
        inputs: Sequence[_Value] = (),
        index: int = 0,
        source: Any = None,
    ) -> None:
        self.kind, self.leaf, self.shape, self.dtype = kind, leaf, tuple(aval.shape), aval.dtype
        self.role, self.value = role, value
        self.primitive, self.params, self.inputs = primitive, params or {}, tuple(inputs)
        self.index, self.source, self.number = index, source, next(_numbers)


@final
class Program:
    """A computation of some values from inputs with roles. Equal texts mean equal programs."""

    def __init__(self, results: Sequence[_Value]) -> None:
        self._results = list(results)
        reached: dict[int, _Value] = {}
        left = list(results)
        while left:
            node = left.pop()
            if node.number not in reached:
                reached[node.number] = node
                left += node.inputs
        self._nodes = [reached[number] for number in sorted(reached)]
        self.roles = {node.role for node in self._nodes if node.role}
        self.text = self._text()

    def __call__(self, inputs: Mapping[str, Any], size: int | None = None) -> list[Any]:
        """Return the results; those of elements as flat arrays of a size, like the inputs. For `jax.jit`."""
        known: dict[int, Any] = {}
        several: dict[int, Any] = {}
        for node in self._nodes:
            if node.role:
                known[node.number] = inputs[node.role]
            elif node.primitive is None:
                known[node.number] = node.value
            elif node.kind == "free":
                arrays = [_materialized(known[each.number], each) for each in node.inputs]
                known[node.number] = _bind(node, arrays, several)
            else:
                known[node.number] = _apply(node, [known[each.number] for each in node.inputs], size)
        results = []
        for node in self._results:
            value = known[node.number]
            if node.kind == "uniform" or (node.kind == "element" and jnp.ndim(value) == 0):
                value = jnp.asarray(value, node.dtype)
            if size is not None and jnp.ndim(value) == 0:
                value = jnp.broadcast_to(value, (size,))
            results.append(value)
        return results

    def constant(self) -> float | None:
        """Return the number that all elements of its single result have; None if they depend on inputs."""
        return None if self.roles else float(self({}, 1)[0][0])

    def _text(self) -> str:
        numbers: dict[int, int] = {}
        lines = []
        for node in self._nodes:
            number = numbers[node.number] = len(numbers)
            shape = node.shape if node.kind == "free" else ""
            if node.role:
                what = node.role
            elif node.primitive is None:
                what = word(node.value)
            else:
                what = f"{node.primitive}[{_params(node)}]{[numbers[each.number] for each in node.inputs]}#{node.index}"
            lines.append(f"{number}:{node.kind} {node.dtype}{shape} = {what}")
        return "; ".join([*lines, f"return {[numbers[node.number] for node in self._results]}"])


def _materialized(value: Any, node: _Value) -> Any:
    return jnp.broadcast_to(jnp.asarray(value, node.dtype), node.shape) if node.kind == "uniform" else value


def _bind(node: _Value, arrays: Sequence[Any], several: dict[int, Any]) -> Any:
    """Return a result of a free operation, as in the jaxpr."""
    primitive, key = node.primitive, id(node.source)
    if key not in several:
        params = primitive.get_bind_params(dict(node.params))
        if isinstance(params, tuple):  # before JAX 0.10
            subfuns, params = params
            arrays = [*subfuns, *arrays]
        found = primitive.bind(*arrays, **params)
        several[key] = found if primitive.multiple_results else [found]
    return several[key][node.index]


def _apply(node: _Value, values: list[Any], size: int | None) -> Any:
    """Return an operation's result on flat arrays of elements; one number for uniform values."""
    name = node.primitive.name
    if name in _RESHAPES:
        return values[0]
    flat = size if any(each.kind == "element" for each in node.inputs) else None
    arrays = []
    for place, (each, value) in enumerate(zip(node.inputs, values, strict=True)):
        scalar = each.kind == "free" and ((name == "select_n" and place == 0) or (name == "clamp" and place != 1))
        value = jnp.asarray(value, each.dtype)
        arrays.append(jnp.broadcast_to(value, (flat,)) if flat is not None and not scalar else value)
    params = {**node.params, "sharding": None} if "sharding" in node.params else node.params
    return node.primitive.bind(*arrays, **params)


def _params(node: _Value) -> str:
    shaped = node.kind != "free" and node.primitive.name in _RESHAPES
    return "" if shaped else ", ".join(f"{name}={word(value)}" for name, value in sorted(node.params.items()))


def word(value: Any) -> str:
    """Return a text of a parameter or a constant, equal in every process."""
    if hasattr(value, "jaxpr") and hasattr(value, "consts"):
        return _jaxpr_text(value.jaxpr) + "".join(map(word, value.consts))
    if hasattr(value, "eqns"):
        return _jaxpr_text(value)
    if isinstance(value, (bool, int, float, complex, str, type(None), np.dtype)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(word, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k}: {word(v)}' for k, v in value.items())}}}"
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            value = jax.random.key_data(value)
        array = np.ascontiguousarray(value)
        return f"{array.dtype}{array.shape}#{hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    if hasattr(value, "name") and isinstance(value.name, str):
        return value.name
    return "function" if callable(value) else type(value).__name__


def _jaxpr_text(jaxpr: Any) -> str:
    numbers: dict[Any, int] = {}

    def name(variable: Any) -> str:
        if isinstance(variable, core.Literal):
            return word(variable.val)
        return f"v{numbers.setdefault(variable, len(numbers))}:{variable.aval.str_short()}"

    lines = ["(" + " ".join(map(name, (*jaxpr.constvars, *jaxpr.invars))) + ")"]
    for eqn in jaxpr.eqns:
        params = ", ".join(f"{key}={word(value)}" for key, value in sorted(eqn.params.items()))
        lines.append(
            f"{' '.join(map(name, eqn.outvars))} = {eqn.primitive.name}[{params}] {' '.join(map(name, eqn.invars))}"
        )
    return "{" + "; ".join([*lines, " ".join(map(name, jaxpr.outvars))]) + "}"


def digest(*texts: str) -> str:
    """Return a short digest of texts, equal in every process."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


@final
class Reading:
    """An elementwise rule.

    Attributes:
        kept: the names and dtypes of each leaf's state per element.
        programs: of each leaf: from "weights", "gradient", its slots, the free state and extra arguments ("extra 0", …) to the
            weights and slots after a step.
        free_state: the roles of the free state; its `first` program computes it, `next_free` its value after a step.
        first, next_free: the programs.
        free_forms: their shapes and dtypes.
        starts: by leaf and slot the value of all its elements before the first step; None if they differ.
        initial: by leaf and slot the program that computes it from the weights.
        text: of all.
    """

    def __init__(
        self,
        kept: list[dict[str, np.dtype]],
        programs: list[Program],
        free_state: list[str],
        free_forms: list[Any],
        first: Program,
        next_free: Program,
        initial: list[dict[str, Program]],
    ) -> None:
        self.kept, self.programs, self.free_state, self.free_forms = kept, programs, free_state, free_forms
        self.first, self.next_free, self.initial = first, next_free, initial
        self.starts = [{name: program.constant() for name, program in each.items()} for each in initial]
        begun = [program for each in initial for program in each.values()]
        self.text = "\n".join([program.text for program in (*programs, first, next_free, *begun)])


def read(init: Any, update: Any, params: Any, extra: Sequence[Any] = ()) -> Reading:
    """Return the rule of a transformation whose update of each element only depends on that element.

    Args:
        init, update: the transformation's; `update` takes the numbers of `extra` after its usual arguments.
        params: a tree of `jax.ShapeDtypeStruct`.
        extra: numbers or arrays.

    Raises:
        Mixes: the update mixes elements.
        Exception: an error of the transformation on the tree, or of JAX if it cannot be traced.
    """

    def step(params: Any, grads: Any, state: Any, numbers: Sequence[Any]) -> tuple[Any, Any]:
        updates, state = update(grads, state, params, *numbers)
        return optax.apply_updates(params, updates), state

    start, state = jax.make_jaxpr(init, return_shape=True)(params)
    closed, (after, next_state) = jax.make_jaxpr(step, return_shape=True)(params, params, state, list(extra))
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    kept, structure = jax.tree_util.tree_flatten_with_path(state)
    then, next_structure = jax.tree.flatten(next_state)
    if structure != next_structure or [(x.shape, x.dtype) for _, x in kept] != [(x.shape, x.dtype) for x in then]:
        raise Mixes("state that changes its form")
    if [(x.shape, x.dtype) for x in jax.tree.leaves(after)] != [(x.shape, x.dtype) for _, x in leaves]:
        raise Mixes("parameters that change their form")
    places = _places(leaves, kept)
    weights = [_Value("element", x, leaf=i, role="weights") for i, (_, x) in enumerate(leaves)]
    gradients = [_Value("element", x, leaf=i, role="gradient") for i, (_, x) in enumerate(leaves)]
    inputs = []
    for number, ((_, x), place) in enumerate(zip(kept, places, strict=True)):
        if place is None:
            inputs.append(_Value("free", x, role=f"state {number}"))
        else:
            inputs.append(_Value("element", x, leaf=place[0], role=f"slot {place[1]}"))
    forms_of_extra = closed.in_avals[len(closed.in_avals) - len(extra) :]
    more = [_Value("free", form, role=f"extra {number}") for number, form in enumerate(forms_of_extra)]
    reader = _Reader([tuple(x.shape) for _, x in leaves])
    results = reader.walk_closed(closed, [*weights, *gradients, *inputs, *more])
    started = reader.walk_closed(start, weights)
    own: list[list[_Value]] = [[_of_leaf(node, i)] for i, node in enumerate(results[: len(leaves)])]
    names: list[dict[str, np.dtype]] = [{} for _ in leaves]
    initial: list[dict[str, Program]] = [{} for _ in leaves]
    free, first, forms = [], [], []
    for place, (_, x), node, begun in zip(places, kept, results[len(leaves) :], started, strict=True):
        if place is None:
            free.append(_free(node))
            first.append(_free(begun))
            forms.append(x)
            continue
        leaf, name = place
        own[leaf].append(_of_leaf(node, leaf))
        names[leaf][name] = x.dtype
        initial[leaf][name] = Program([_of_leaf(begun, leaf)])
    roles = [f"state {number}" for number, place in enumerate(places) if place is None]
    return Reading(names, list(map(Program, own)), roles, forms, Program(first), Program(free), initial)


def _places(leaves: Sequence[Any], kept: Sequence[Any]) -> list[tuple[int, str] | None]:
    """Return the leaf and a name for each array of the state with a number per element; None for others."""
    by_path = {path: (index, x) for index, (path, x) in enumerate(leaves)}
    found: list[tuple[int, str] | None] = []
    for path, x in kept:
        place = None
        for cut in range(len(path) + 1):  # the longest end of the path that is a leaf's
            index, leaf = by_path.get(path[cut:], (0, None))
            if leaf is not None and leaf.shape == x.shape and _fits(x.dtype, leaf.dtype):
                place = index, ".".join(str(_name(key)).replace("/", ".") for key in path[:cut]) or "state"
                break
        found.append(place)
    named = [place for place in found if place is not None]
    if len(set(named)) != len(named):
        raise Mixes("state with two arrays of one name")
    return found


def _fits(dtype: Any, slot: Any) -> bool:
    """Return whether a slot of a dtype represents numbers of another one exactly."""
    floating = jax.dtypes.issubdtype(dtype, np.floating)
    return bool(floating and (dtype == slot or jnp.finfo(dtype).bits < jnp.finfo(slot).bits))


def _name(key: Any) -> Any:
    return next((getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name)), key)


def _free(node: _Value) -> _Value:
    if node.kind == "element":
        raise Mixes("state that depends on elements and has not their shape")
    if node.kind == "free" or not node.shape:
        return node
    raise Mixes("state of a leaf's shape that is not named like one")


def _of_leaf(node: _Value, leaf: int) -> _Value:
    if node.kind == "free" and node.shape:
        raise Mixes("constants that differ between elements, or random numbers")
    if node.kind == "element" and node.leaf != leaf:
        raise Mixes("elements of several leaves")
    return node


@final
class _Reader:
    """A walk over a jaxpr that creates nodes of its values."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._shapes = shapes

    def walk_closed(self, closed: Any, inputs: Sequence[_Value]) -> list[_Value]:
        if getattr(closed, "effects", None):
            raise Mixes(f"effects: {', '.join(sorted(map(str, closed.effects)))}")
        return self.walk(closed.jaxpr, [self._constant(value) for value in closed.consts], inputs)

    def walk(self, jaxpr: Any, consts: Sequence[_Value], inputs: Sequence[_Value]) -> list[_Value]:
        known: dict[Any, _Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def node_of(variable: Any) -> _Value:
            return self._constant(variable.val) if isinstance(variable, core.Literal) else known[variable]

        for eqn in jaxpr.eqns:
            nodes = [node_of(variable) for variable in eqn.invars]
            known.update(zip(eqn.outvars, self._eqn(eqn, nodes), strict=True))
        return [node_of(variable) for variable in jaxpr.outvars]

    def _constant(self, value: Any) -> _Value:
        if not hasattr(value, "shape"):
            value = jnp.asarray(value)
        extended = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
        if value.shape and value.size and not extended:
            flat = np.asarray(value).reshape(-1)
            if (flat == flat[0]).all():
                return _Value("uniform", value, value=flat[0])
        return _Value("free", value, value=value)

    def _eqn(self, eqn: Any, nodes: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        if name in _CALLS and _CALLS[name] in eqn.params:
            inner = eqn.params[_CALLS[name]]
            return self.walk_closed(inner, nodes) if hasattr(inner, "consts") else self.walk(inner, [], nodes)
        if name == "optimization_barrier":
            return nodes
        if name == "cond" and (any(node.kind != "free" for node in nodes) or any(v.aval.shape for v in eqn.outvars)):
            return self._cond(eqn, nodes)
        elements = [node for node in nodes if node.kind == "element"]
        if elements:
            return self._elements(eqn, nodes, elements)
        uniform = [node for node in nodes if node.kind == "uniform"]
        if len(eqn.outvars) == 1 and eqn.outvars[0].aval.shape:
            plain = all(node.kind == "uniform" or not node.shape for node in nodes)
            if (
                name in _RESHAPES
                and (uniform or (name == "broadcast_in_dim" and not nodes[0].shape))
                and len(nodes) == 1
            ):
                return self._made(eqn, nodes, "uniform")
            if name in _ELEMENTWISE and uniform and plain:
                return self._made(eqn, nodes, "uniform")
        return self._made(eqn, nodes, "free")

    def _elements(self, eqn: Any, nodes: list[_Value], elements: list[_Value]) -> list[_Value]:
        name, leaf = eqn.primitive.name, elements[0].leaf
        assert leaf is not None
        shape = self._shapes[leaf]
        if any(node.leaf != leaf for node in elements):
            raise Mixes(f"elements of several leaves, in {name}")
        same = all(tuple(variable.aval.shape) == shape for variable in eqn.outvars)
        if name in _RESHAPES and same and len(nodes) == 1:
            return [elements[0]]
        if name not in _ELEMENTWISE or not same:
            raise Mixes(name)
        if any(node.kind == "free" and node.shape for node in nodes):
            raise Mixes(f"constants that differ between elements, or random numbers, in {name}")
        return self._made(eqn, nodes, "element", leaf)

    def _cond(self, eqn: Any, nodes: list[_Value]) -> list[_Value]:
        """Return the computed results of both branches, and a selection of one of them."""
        index, *operands = nodes
        if index.kind == "element":
            raise Mixes("a condition on elements")
        branches = [self.walk_closed(branch, operands) for branch in eqn.params["branches"]]
        if len(branches) == 1:
            return branches[0]
        last = _Value("free", index, value=np.asarray(len(branches) - 1, index.dtype))
        zero = _Value("free", index, value=np.asarray(0, index.dtype))
        if index.dtype != np.bool_:
            clamp = jax.lax.clamp_p
            index = _Value("free", index, primitive=clamp, inputs=(zero, index, last), source=object())
        results = []
        for cases in zip(*branches, strict=True):
            if all(case is cases[0] for case in cases):
                results.append(cases[0])
                continue
            if jax.dtypes.issubdtype(cases[0].dtype, jax.dtypes.extended):
                raise Mixes("a condition on random keys")
            leaves = {case.leaf for case in cases if case.kind == "element"}
            if len(leaves) > 1:
                raise Mixes("elements of several leaves, in cond")
            uniform = any(case.kind == "uniform" for case in cases)
            kind: Kind = "element" if leaves else "uniform" if uniform else "free"
            if kind != "free" and any(case.kind == "free" and case.shape for case in cases):
                raise Mixes("constants that differ between elements, or random numbers, in cond")
            results.append(
                _Value(
                    kind,
                    cases[0],
                    leaf=next(iter(leaves), None),
                    primitive=jax.lax.select_n_p,
                    inputs=(index, *cases),
                    source=object(),
                )
            )
        return results

    def _made(self, eqn: Any, nodes: list[_Value], kind: Kind, leaf: int | None = None) -> list[_Value]:
        source = object()
        return [
            _Value(
                kind,
                variable.aval,
                leaf=leaf,
                primitive=eqn.primitive,
                params=eqn.params,
                inputs=nodes,
                index=index,
                source=source,
            )
            for index, variable in enumerate(eqn.outvars)
        ]
