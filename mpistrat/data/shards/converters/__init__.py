"""Files of other kinds as rows: NumPy's arrays, tables, folders of images."""
