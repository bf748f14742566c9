"""What knows nothing of distributed training, and every floor uses."""
