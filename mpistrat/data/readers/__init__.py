"""Readers of one dataset of HDF5 files: each knows one way in which rows can be stored."""
