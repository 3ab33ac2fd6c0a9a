"""Datasets: their records, the plans of their batches, and the input that carries plans out."""
