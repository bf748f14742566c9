"""Parameter servers: ranks that store variables, which workers pull, and to which they push asynchronously."""
