import numpy as np

from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import Sphere
from hypjax.integrations.ann import IndexedGallery

space = Sphere()
features = np.random.default_rng(0).normal(size=(500, 64))
gallery = Embeddings.from_arrays(features, space=space)
short = Embeddings.from_arrays(features[:, :16], space=space)
_, candidates = IndexedGallery.build(short).search_rows(short.vectors[:3], k=100)
distances = space.distance(gallery.vectors[:3, None], gallery.vectors[candidates])
ids = np.take_along_axis(candidates, np.argsort(distances, axis=1), axis=1)[:, :10]
