"""Parameter servers: ranks that store variables, from which workers pull and to which they push asynchronously."""
