"""Random programs and damaged files, next to a reference."""
