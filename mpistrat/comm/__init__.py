"""Moving bytes: process groups, node-shared memory, buffers, packing, and the checks that keep wrong use from hanging."""
