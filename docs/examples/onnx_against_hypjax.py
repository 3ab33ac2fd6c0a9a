import pathlib
import runpy

import numpy as np

model = runpy.run_path(str(pathlib.Path(__file__).with_name("onnx_search.py")))
paths, points = model["embed_folder"]("shop/test")
hypjax = np.load("shop.npz")
rows = {str(path): row for row, path in enumerate(hypjax["ids"])}
vectors = hypjax["vectors"][[rows[str(path.resolve())] for path in paths]].astype(np.float64)

_, labels = np.unique([path.parent.name for path in paths], return_inverse=True)
pairs = np.concatenate([model["distances"](x[None], points, model["space"]) for x in points])
others = pairs[~np.eye(len(paths), dtype=bool)]
np.fill_diagonal(pairs, np.inf)
print(f"recall@1 {np.mean(labels[pairs.argmin(axis=1)] == labels):.4f}")
print(f"median distance {np.median(others):.2f}")
moved = [
    model["distances"](x[None], y[None], model["space"]).item() for x, y in zip(points, vectors)
]
print(f"farthest from hypjax {max(moved):.4f}")
