"""Communication: process groups, node-shared memory, buffers, packing, and the checks that turn misuse into errors."""
