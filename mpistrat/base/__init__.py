"""Code used by all other packages; it imports none of them."""
