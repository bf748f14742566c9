"""Programs that run after `pip install`, as examples and as a test of the installation."""
