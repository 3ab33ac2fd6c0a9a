"""Image retrieval with hyperbolic embeddings, in JAX and Flax."""

__version__ = "0.1.0"
