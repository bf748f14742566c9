"""How values of several replicas become one: the CrossDeviceOps, one algorithm a file, and the chooser's table."""
