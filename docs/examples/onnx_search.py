import json
import pathlib
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
facts = session.get_modelmeta().custom_metadata_map
space, view = json.loads(facts["hypjax.space"]), json.loads(facts["hypjax.view"])
mode = {1: "L", 3: "RGB"}[view["channels"]]
suffixes = {".jpg", ".jpeg", ".png", ".webp"}


def embed(image):
    image = np.asarray(ImageOps.exif_transpose(image).convert(mode))
    pixels = image.reshape(1, *image.shape[:2], view["channels"])
    return session.run(["points"], {"images": pixels})[0].astype(np.float64)


def distances(x, y, space):
    xx, yy, xy = (x * x).sum(1)[:, None], (y * y).sum(1)[None], x @ y.T
    if space["name"] == "sphere":
        return 2 - 2 * xy
    if space["name"] == "fused":  # Several spaces: a weighted sum of distances.
        x, y = (np.split(z, len(space["parts"]), axis=1) for z in (x, y))
        return sum(w * distances(a, b, s) for a, b, (s, w) in zip(x, y, space["parts"]))
    c, s = space["c"] + 1e-12, np.maximum(xx + yy - 2 * xy, 0)
    if space["name"] == "poincare":
        return 2 / c**0.5 * np.arcsinh((c * s / ((1 - c * xx) * (1 - c * yy))) ** 0.5)
    assert space["name"] == "lorentz"  # The hyperboloid; points come without their time.
    times = (1 + c * xx) ** 0.5 + (1 + c * yy) ** 0.5
    s = np.maximum(s - c * ((xx - yy) / times) ** 2, 0)  # Minus the squared difference of times.
    return 2 / c**0.5 * np.arcsinh((c * s) ** 0.5 / 2)


def embed_folder(folder):
    paths = sorted(p for p in pathlib.Path(folder).rglob("*") if p.suffix.lower() in suffixes)
    if not paths:
        sys.exit(f"there are no images in {folder}")
    return paths, np.concatenate([embed(Image.open(path)) for path in paths])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python search.py FOLDER IMAGE")
    folder, query = sys.argv[1:]
    paths, gallery = embed_folder(folder)
    (row,) = distances(embed(Image.open(query)), gallery, space)
    for i in np.argsort(row, kind="stable")[:10]:
        print(f"{row[i]:.4f} {paths[i]}")
