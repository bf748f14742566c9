"""The stages of a chain: each is a dataset that reads from other datasets."""
