"""HDF5 files as rows: the dataset, and a reader for each storage layout of a field."""
