import datasets
import numpy as np

gallery = datasets.load_dataset("gallery.dataset", split="gallery").with_format("numpy")
points, c = np.float64(gallery["vector"][:]), 0.1  # The card tells c.


def distance(x, y):  # In the Poincaré ball.
    s = np.sum((x - y) ** 2, axis=-1)
    p = (1 - c * np.sum(x * x, axis=-1)) * (1 - c * np.sum(y * y, axis=-1))
    return 2 / c**0.5 * np.arcsinh(np.sqrt(c * s / p))


for i in np.argsort(distance(points[0], points))[:10].tolist():
    print(gallery[i]["id"])
