"""A trained model meets images: its weights, its embeddings, their scores."""
