"""Experiments: a method, trained models of it, and its scores on images."""
