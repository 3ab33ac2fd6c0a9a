"""Monitoring of training: measurements, progress, traces, and steps that are not finite."""
