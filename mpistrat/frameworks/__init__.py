"""The code that the adapters of PyTorch, JAX and Keras share. It imports none of these libraries."""
