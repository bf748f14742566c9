"""All tests: on one process, on ranks, over hosts."""

pytest_plugins = ["tests.launch.launcher_plugin"]
