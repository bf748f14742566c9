"""Parameter servers: ranks that hold variables, which others read and push updates to without waiting for each other."""
