"""Benchmarks and load tests: each prints a table for people and one JSON object as its last line."""
