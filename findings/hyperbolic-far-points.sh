#!/usr/bin/env bash
# Hyperbolic distances of libraries end at a bound, also in float64: far points look near.
#
# Versions: geoopt 0.5.1 with torch 2.13.0, geomstats 2.8.0 with NumPy 1.26.4.
#
# Source: the ball's points at the distance r from the origin have the norm tanh(r/2), the
# hyperboloid's have the first coordinate cosh(r). Libraries keep points away from the boundary:
# geoopt clips what `artanh` takes at 1 - 1e-7 in float64, too; geomstats clips norms.
#
# Input: in float64, which holds such points of the ball up to r = 36: x at the distance r from the
# origin, its opposite, and x' on the same ray at r + 2.
#
# Expected: r from the origin, 2r between opposites, and 2 between x and x'.
#
# Seen: geoopt's distances in the ball end at 16.81. From r = 20 on, x and x' are
# at 0.06 and less, and if they are made by `expmap0`, at 0 from r = 15 on. Its Lorentz model returns
# -17.27, a negative distance. geomstats' ball ends at 15.20 from the origin and returns 0.007 for x
# and x' at r = 20; its hyperboloid returns 0 for the distance of 20 from the origin, and NaN for x
# and x'.
#
# Why it matters: trees are embedded far out, where the nearest neighbour is then any item of the
# same branch, and all leaves are as near as the bound. hypjax computes distances by the points'
# gaps to the boundary, without a bound.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet geoopt==0.5.1 torch==2.13.0 geomstats==2.8.0 numpy==1.26.4

cat >"$work/far.py" <<'PYTHON'
import math

import geoopt
import numpy as np
import torch
from geomstats.geometry.hyperboloid import Hyperboloid
from geomstats.geometry.poincare_ball import PoincareBall


def in_ball(r):
    return np.array([math.tanh(r / 2), 0.0])


def on_hyperboloid(r):
    return np.array([math.cosh(r), math.sinh(r), 0.0])


def by_torch(distance):
    return lambda x, y: float(distance(torch.from_numpy(x), torch.from_numpy(y)))


ball = geoopt.PoincareBall(c=torch.tensor(1.0, dtype=torch.float64))
lorentz = geoopt.Lorentz(k=torch.tensor(1.0, dtype=torch.float64))
MODELS = {
    "geoopt, ball": (by_torch(ball.dist), in_ball),
    "geoopt, Lorentz": (by_torch(lorentz.dist), on_hyperboloid),
    "geomstats, ball": (PoincareBall(2).metric.dist, in_ball),
    "geomstats, hyperboloid": (Hyperboloid(2).metric.dist, on_hyperboloid),
}
seen = {}
for name, (distance, point) in MODELS.items():
    for r in (5, 10, 20, 30):
        pairs = (0, r), (-r, r), (r, r + 2)
        values = [float(distance(point(a), point(b))) for a, b in pairs]
        seen[name, r] = values
        print(f"{name}, r = {r}: {r} is {values[0]:.3f}, {2 * r} is {values[1]:.3f}, 2 is {values[2]:.3f}")
mapped = [ball.expmap0(torch.tensor([r / 2, 0.0], dtype=torch.float64)) for r in (15, 17)]
is_so = [
    max(abs(np.array(seen[name, 5]) - [5, 10, 2]).max() for name in MODELS) < 1e-6,
    abs(seen["geoopt, ball", 20][1] - 16.811) < 0.01 and seen["geoopt, ball", 20][2] < 0.1,
    float(ball.dist(*mapped)) == 0,
    seen["geoopt, Lorentz", 20][2] < 0,
    abs(seen["geomstats, ball", 20][0] - 15.2) < 0.01 and seen["geomstats, ball", 20][2] < 0.01,
    seen["geomstats, hyperboloid", 20][0] == 0 and math.isnan(seen["geomstats, hyperboloid", 20][2]),
]
if not all(is_so):
    raise SystemExit(f"this has changed: {is_so}")
PYTHON
"$work/venv/bin/python" -W ignore "$work/far.py"
echo "as described: distances end at a bound, and those along a ray vanish"
