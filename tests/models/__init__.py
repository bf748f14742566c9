"""Reference models, and devices that the machine does not have."""
