"""Sets of HDF5 files: resolving, inspecting and writing them, and their manifest."""
