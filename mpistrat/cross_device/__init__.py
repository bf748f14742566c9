"""Reductions of several replicas' values: the CrossDeviceOps, one algorithm per file, and the chooser's table."""
