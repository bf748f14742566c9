"""HDF5 files as rows: the dataset, and a reader for each way in which files store a field."""
