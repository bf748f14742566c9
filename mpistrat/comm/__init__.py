"""Communication: process groups, node-shared memory, buffers, packing, and checks that turn misuse into errors."""
