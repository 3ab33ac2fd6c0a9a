import numpy as np

from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import PoincareBall
from hypjax.retrieval import nearest_neighbors

features = np.random.default_rng(0).normal(size=(60, 8)) + np.repeat(np.eye(8)[:6] * 9, 10, axis=0)
gallery = Embeddings.from_arrays(
    features, np.repeat(np.arange(6), 10), space=PoincareBall(0.1, 2.3)
)
points, labels = gallery.vectors, gallery.labels  # Or those of Embeddings.load("gallery.npz").
distances, ids = nearest_neighbors(points, points, k=1, space=gallery.space, exclude_self=True)
print(np.quantile(distances[labels[ids] == labels[:, None]], 0.95))
