"""Programs that run after `pip install`, as examples and as the package's own proof."""
