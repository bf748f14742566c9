"""Sets of HDF5 files: which files, what is in them, their manifest, and how they are written."""
