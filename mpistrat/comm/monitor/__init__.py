"""Monitors of ranks: what each is doing, which ones have left, failed or were killed, and how that ends the job."""
