import faiss
from hypjax.retrieval import euclidean
from hypjax.galleries.embeddings import Embeddings

gallery = Embeddings.load("gallery.npz")
index = faiss.IndexHNSWFlat(gallery.vectors.shape[1], 32)
index.hnsw.efConstruction = index.hnsw.efSearch = 256
index.add(gallery.vectors)
separations, found = euclidean.nearest(
    lambda points, m: index.search(points, m)[1],
    gallery.vectors,
    gallery.vectors[:5],  # The queries.
    k=10,
    space=gallery.space,
    candidates=index.hnsw.efSearch,
)
print(gallery.ids[found], gallery.space.distance_at(separations))
