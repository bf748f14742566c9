"""Converters of other file kinds to rows: NumPy arrays, tables, image folders."""
