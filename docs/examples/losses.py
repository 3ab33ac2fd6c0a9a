import jax

from hypjax.geometry import PoincareBall, Sphere
from hypjax.objectives import mixed_space, multi_similarity, pairwise_cross_entropy, proxy_anchor

features = jax.random.normal(jax.random.key(0), (200, 128))
labels = jax.numpy.arange(200) // 2
sphere, ball = Sphere(), PoincareBall(c=0.1, clip_radius=2.3)
points = sphere.embed(features)  # Losses do not check that points lie in their space.
loss = multi_similarity(points, labels, space=sphere)
proxies = sphere.embed(jax.random.normal(jax.random.key(1), (100, 128)))
loss = proxy_anchor(points, labels, proxies, space=sphere)
# HypMix is the pairwise cross-entropy of a sum of two distances.
both = mixed_space(ball, sphere_temperature=0.05, ball_temperature=0.2, ball_weight=3.0)
loss = pairwise_cross_entropy(both.embed(features), space=both, temperature=1.0, labels=labels)
