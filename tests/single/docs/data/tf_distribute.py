"""Print the public names of TensorFlow's tf.distribute, one a line: `python tf_distribute.py > tf_distribute.txt`.

A member that a class has from a public class of tf.distribute is named there only.
"""

import inspect
import os
from types import ModuleType


def public(thing: object) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]


def everything(module: ModuleType, prefix: str = "") -> dict[str, object]:
    """All modules, classes, functions of a module and of those in it, by name."""
    found = {}
    for name in public(module):
        value = getattr(module, name)
        found[prefix + name] = value
        if inspect.ismodule(value):
            found |= everything(value, f"{prefix}{name}.")
    return found


def members(name: str, value: type, classes: list[type]) -> list[str]:
    bases = [base for base in value.__mro__[1:] if base in classes or base in (object, tuple)]
    return [f"{name}.{member}" for member in public(value) if not any(hasattr(base, member) for base in bases)]


def names(module: ModuleType) -> list[str]:
    found = everything(module)
    classes = [value for value in found.values() if inspect.isclass(value)]
    result = list(found)
    for name, value in found.items():
        if inspect.isclass(value):
            result += members(name, value, classes)
    return sorted(result)


if __name__ == "__main__":
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import tensorflow

    print("\n".join(names(tensorflow.distribute)))
