"""Prepares datasets: converts official files, or draws letters, and writes records."""
