"""Test suites that others wrote, run on this package. Their files come with the wheels, and are not in this repository."""
