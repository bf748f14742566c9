"""All tests: on one process, on ranks, over hosts."""

pytest_plugins = ["launcher_plugin"]
