import jax

from hypjax.geometry import PoincareBall, poincare
from hypjax.objectives import pairwise_cross_entropy
from hypjax.retrieval import nearest_neighbors, recall_at_k

ball = PoincareBall(c=0.1, clip_radius=2.3)
features = jax.random.normal(jax.random.key(0), (200, 128))
labels = jax.numpy.arange(200) // 2


@jax.jit
def loss_of(features, labels):
    points = ball.embed(features)
    balanced = {"labels": labels, "samples_per_class": 2}  # Under jit, the number is required.
    return pairwise_cross_entropy(points, space=ball, temperature=0.2, **balanced)


loss, gradients = jax.value_and_grad(loss_of)(features, labels)
points = ball.embed(features)
recalls = recall_at_k(points, labels, ks=(1, 10), space=ball)
found_distances, found = nearest_neighbors(points, points, k=10, space=ball, exclude_self=True)
distances = poincare.dist_matrix(points, points, c=0.1)
