"""The protocol between workers and servers: messages, windows, and the choice between them."""
