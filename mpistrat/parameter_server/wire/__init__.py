"""What workers and servers exchange, and how: messages, windows, and the choice between them."""
