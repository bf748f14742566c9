"""The nodes of a chain of datasets: each says what it does with the rows or elements of those below it."""
