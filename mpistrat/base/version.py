"""The version of mpistrat, defined here only."""

__version__ = "0.1.0"
