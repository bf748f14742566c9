"""Who the tasks of a cluster are: the sources of its description."""
