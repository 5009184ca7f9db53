"""Benchmarks and load tests.

Each prints a table for people and, as its last line, one JSON object for machines.
"""
