"""A parameter server: its variables, its service, and its handling of pushes."""
