"""The train step, the optimiser, and the parts of the loop."""
