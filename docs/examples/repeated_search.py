import numpy as np

c, k = 0.1, 10


def nearest(candidates, q):
    """Ids and distances of the k nearest; candidates(x) returns ids and points near x."""
    centre, gap, last = q, 1 - c * q @ q, np.inf
    while True:
        ids, points = candidates(centre)
        separations = np.sum((points - q) ** 2, axis=1) / gap / (1 - c * np.sum(points**2, axis=1))
        best = np.argsort(separations)[:k]
        if separations[best[-1]] >= last:
            return found
        found = ids[best], 2 / c**0.5 * np.arcsinh((c * separations[best]) ** 0.5)
        last = separations[best[-1]]
        centre = q / (1 + c * last * gap)
