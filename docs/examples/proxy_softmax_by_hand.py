import numpy as np
from hypjax.objectives.proxy_softmax import ProxySoftmax

from hypjax.geometry import PoincareBall
from hypjax.types import Batch, Outputs

BALL = PoincareBall(c=0.1, clip_radius=2.3)


def test_equals_a_plain_loop():
    objective, random = ProxySoftmax(BALL, 0.2, 0.99), np.random.default_rng(0)
    features, taught, proxies = (random.normal(size=(3, 4)).astype("f") for _ in range(3))
    labels, centre, losses = [2, 0, 1], random.normal(size=3).astype("f"), []
    points, shown, places = (np.asarray(BALL.embed(x)) for x in (features, taught, proxies))
    for i in range(3):
        weights = np.exp([-BALL.distance(points[i], p) / 0.2 for p in places])
        target = np.exp([-BALL.distance(shown[i], p) / 0.2 for p in places] - centre)
        losses.append(-np.log(weights / weights.sum())[labels[i]])
        losses[i] -= target / target.sum() @ np.log(weights / weights.sum())
    outputs, teacher = Outputs(features, features), Outputs(taught, taught)
    batch = Batch(None, np.array(labels), None, None)
    loss, _ = objective.loss({"proxies": proxies}, {"centre": centre}, outputs, teacher, batch)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-4)
