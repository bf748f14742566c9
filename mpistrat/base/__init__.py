"""What every other part of the package uses; it uses none of them."""
