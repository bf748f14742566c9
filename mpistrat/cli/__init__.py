"""The commands behind `python -m mpistrat`."""
