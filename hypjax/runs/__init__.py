"""A run's folder: its identity, results and checkpoints, on a disk or in the cloud."""
