"""Watches training: measurements, progress, traces, and whether all is finite."""
