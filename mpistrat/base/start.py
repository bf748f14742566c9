"""Start a module of this package, or a file of it. Run by its path, as `start.py WHAT WORD …`; see `programs.py`.

It imports nothing before this file's folder is off the path, because names there must not shadow the standard library. The
package is the one that contains this file, whatever else is installed.
"""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # missing in Python 3.10
        del sys.path[0]

    import importlib.util
    import os
    import runpy

    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        _package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        if importlib.util.find_spec("mpistrat") is None:
            sys.path.append(os.path.dirname(_package))
        _spec = importlib.util.spec_from_file_location(
            "mpistrat", os.path.join(_package, "__init__.py"), submodule_search_locations=[_package]
        )
        assert _spec is not None and _spec.loader is not None
        sys.modules["mpistrat"] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules["mpistrat"])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
