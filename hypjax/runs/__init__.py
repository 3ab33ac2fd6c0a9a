"""The folder of a run, local or in the cloud: configuration, results and checkpoints."""
