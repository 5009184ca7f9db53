"""Prometheus alerts and Grafana dashboards, and the program that writes the latter."""
