import json
import pathlib

import numba
import numpy as np
import pyarrow.parquet
from usearch.index import CompiledMetric, Index, MetricKind, MetricSignature

facts = json.loads(pathlib.Path("gallery.ann/gallery.json").read_text())
folder = pathlib.Path("gallery.ann", facts["export"])  # Another one after each export.
table = pyarrow.parquet.read_table(folder / "images.parquet")
points = np.load(folder / "points.npy", mmap_mode="r")  # In the order of the table.
rounded = facts["rounded"]
dim, c = points.shape[1], facts["space"]["c"]
vector = numba.types.CPointer(numba.types.uint16 if rounded else numba.types.float32)


@numba.njit
def wide(value):  # A number in bfloat16 is the upper half of a float32.
    return np.uint32(value << 16).view(np.float32) if rounded else value


@numba.cfunc(numba.types.float32(vector, vector), fastmath={"reassoc", "contract", "nsz"})
def separation(x, y):
    total = numba.types.float32(0)
    for i in range(dim):
        total += (wide(x[i]) - wide(y[i])) ** 2
    return total * wide(x[dim]) * wide(y[dim])


metric = CompiledMetric(separation.address, MetricKind.Unknown, MetricSignature.ArrayArray)
index = Index(ndim=dim + 1, metric=metric, dtype="bf16" if rounded else "f32")
index.view(str(folder / "graph.usearch"))
index.metric = metric  # The file holds none.
index.expansion_search = facts["candidates"]

q = points[0].astype(np.float64)  # A query of the same model: here the first image.
gap = 1 - c * q @ q
found = index.search(np.append(q, 1 / gap).astype(np.float32), 20)
strays = np.flatnonzero(table["stray"])  # Images to which no links lead.
rows = np.union1d(found.keys.astype(int), strays)
rows = np.flatnonzero(np.isin(table["first"], rows))  # The graph holds one image at each point.
near = points[rows].astype(np.float64)
separations = np.sum((near - q) ** 2, axis=1) / gap / (1 - c * np.sum(near**2, axis=1))
for i in np.argsort(separations, kind="stable")[:10]:
    distance = 2 / np.sqrt(c) * np.arcsinh(np.sqrt(c * separations[i]))
    print(f"{distance:.4f} {table['id'][int(rows[i])]}")
