"""Strategies, servers, commands and programs under test."""
