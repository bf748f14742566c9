"""A subclass that stands in for a class of Keras or of the user: by its names, in files, too."""

from __future__ import annotations

from typing import Any

from keras.src import api_export
from keras.src.saving import object_registration

__all__ = ["subclass"]


def subclass(kind: type[Any], methods: type[Any]) -> type[Any]:
    """Return a class of these methods first, then the class's own, which files and programs take for the class."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made = type(kind.__name__, (methods, kind), names)
    for registered in (api_export.REGISTERED_OBJS_TO_NAMES, object_registration.GLOBAL_CUSTOM_NAMES):
        if kind in registered:
            registered[made] = registered[kind]
    return made
