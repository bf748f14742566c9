"""The checks of `mpistrat doctor`; each returns findings."""
