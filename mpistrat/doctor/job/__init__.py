"""The check of a cluster from inside a batch job: `mpistrat doctor --job`, which the script of `mpistrat job --check` runs."""
