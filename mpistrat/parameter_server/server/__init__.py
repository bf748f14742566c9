"""A parameter server: its variables, its service, and what it does with pushes."""
