"""HAPPIER: average precision graded by a hierarchy of labels (Ramzi et al., ECCV 2022).

A query's own class should come first, then the other classes of its coarse class. The paper has
the cosine. In other spaces, `hypjax.objectives.comparisons.similarity` takes its place: that choice
is ours.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, Field, at_least, within
from hypjax.geometry import Space
from hypjax.objectives.base import (
    Extension,
    Group,
    Loss,
    Metrics,
    ProblemSizes,
    adjacent_samples,
)
from hypjax.objectives.comparisons import compare_images, similarity
from hypjax.objectives.proxy_losses import ProxyObjective, normalized_softmax
from hypjax.types import Batch, Outputs

# Defaults are the released code's.
HAPPIER_FIELDS = {
    "weight": Field(0.9, within(0, 1)),  # Of H-AP; the softmax has the rest.
    "alpha": Field(1.0, at_least(0)),  # Exponent of a level in relevances.
    "rank_temperature": Field(0.01, ABOVE_0),  # τ of smooth ranks.
    "slope": Field(100.0, at_least(0)),  # ρ.
    "margin": Field(0.05, at_least(0)),  # δ.
    "temperature": Field(0.05, ABOVE_0, learnable=True),  # Of the softmax.
    # Factor of the proxies' learning rate: Proxy-Anchor's; 200,000 in the recipe for SOP.
    "proxy_rate": Field(100.0, at_least(0)),
}
_STEP, _BEYOND = 0.5, 1.44  # Values that the smooth step jumps by at 0, and has just beyond δ.
_ROUNDING = 1e-5  # Relevances that differ by less, as a share, are equal.
_COMPARISONS = 2**24  # Of a query with two images, at once: 64 MB an array.


def relevances(labels: Int[Array, "levels n"], alpha: float = 1.0) -> Float[Array, "n n"]:
    """Relevances of images (columns) for each image as a query (rows), α = `alpha`.

    An image of level l shares l of the query's L labels, and has the relevance (l/L)^α / |Ω^(l)|,
    where Ω^(l) are the batch's images of exactly this level, with the query in Ω^(L). The released
    code divides l by L − 1, a factor that the loss cancels.
    """
    level = jnp.sum(labels[:, :, None] == labels[:, None], axis=0)
    levels = jnp.arange(1, len(labels) + 1)
    of_level = level[..., None] == levels
    images = jnp.sum(of_level, axis=1, keepdims=True)
    return jnp.sum((levels / len(labels)) ** alpha / jnp.maximum(images, 1) * of_level, axis=-1)


def smooth_hap(
    similarities: Float[Array, "n n"],
    relevances: Float[Array, "n n"],
    *,
    temperature: float = 0.01,
    slope: float = 100.0,
    margin: float = 0.05,
) -> Float[Array, ""]:
    """Smooth upper bound of 1 − H-AP within a batch (Ramzi et al., ECCV 2022; released code).

    H-AP of a query is (1/Σ rel)·Σ_k Hrank(k)/rank(k), over all images, the query included. In
    rank(k), an image j that is less relevant than k counts by a smooth step of t = s_j − s_k:
    σ(t/τ) up to 0, 0.5 + σ(t/τ) up to δ, and ρ·(t − δ) + 1.44 beyond. Other images count by the
    step H(t), with H(0) = 1; Hrank(k) = Σ_j min(rel(j), rel(k))·H(t). Only smooth steps have
    gradients.

    Levels of equal relevance need no order among their images. The released code compares levels
    in place of relevances, which is the same where finer levels are more relevant.

    `temperature` is τ, `slope` ρ and `margin` δ. Row and column q of the matrices are image q, as a
    query and as a result; similarities with itself are the largest. Takes O(n³) operations.
    """
    settings = {"temperature": temperature, "slope": slope, "margin": margin}
    # Gradients compare again, since all comparisons would fill the memory: 3 GB for 900 images.
    query = jax.checkpoint(functools.partial(_hap, **settings))
    block = max(1, _COMPARISONS // max(1, len(relevances)) ** 2)
    scores = lax.map(lambda row: query(*row), (similarities, relevances), batch_size=block)
    return 1 - jnp.mean(scores)


def _hap(
    similarity: Float[Array, " n"],
    relevance: Float[Array, " n"],
    *,
    temperature: float,
    slope: float,
    margin: float,
) -> Float[Array, ""]:
    """Smooth H-AP of one query. Rows are the images k that are ranked, columns the others, j."""
    gaps = similarity - similarity[:, None]
    smooth = jnp.where(
        gaps > margin,
        slope * (gaps - margin) + _BEYOND,
        jax.nn.sigmoid(gaps / temperature) + _STEP * (gaps > 0),
    )
    less_relevant = relevance < (1 - _ROUNDING) * relevance[:, None]
    ranks = jnp.sum(jnp.where(less_relevant, smooth, gaps >= 0), axis=1)
    shared = jnp.minimum(relevance, relevance[:, None])
    return jnp.sum(jnp.sum(shared, axis=1, where=gaps >= 0) / ranks) / jnp.sum(relevance)


def create_happier(config: ConfigDict, space: Space) -> "Happier":
    """Builds the objective that a run's configuration describes."""
    fields, samples = config.objective, adjacent_samples(config)
    softmax = functools.partial(normalized_softmax, temperature=fields.temperature)
    own = HAPPIER_FIELDS.keys() - {"temperature", "proxy_rate"}
    base = ProxyObjective(space, softmax, None, fields.proxy_rate, False, samples)
    return Happier(base=base, samples_per_class=samples, **{name: fields[name] for name in own})


@dataclasses.dataclass(frozen=True)
class Happier(Extension):
    """HAPPIER's loss: `smooth_hap`, beside the base, a normalised softmax of the classes.

    Labels of an image are its class, and its coarse classes at each level, which the training set
    must have. `HAPPIER_FIELDS` explains the numbers.
    """

    weight: float
    alpha: float
    rank_temperature: float
    slope: float
    margin: float
    samples_per_class: int | None  # None if batches hold any classes.

    @property
    def groups(self) -> tuple[Group, ...]:
        """The proxies, which do not decay in the released code."""
        return tuple(group._replace(weight_decay=0.0) for group in super().groups)

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns proxies, uniform within ±1/√dim as released, and the classes' coarse classes.

        Training classes without coarse classes are a `UserError`.
        """
        if not spec.coarse_labels:
            raise UserError("happier needs coarse classes: list coarse_labels of the data set")
        bound = spec.head_dim**-0.5
        shape = (spec.classes, spec.head_dim)
        proxies = jax.random.uniform(key, shape, minval=-bound, maxval=bound)
        coarse = jnp.array(spec.coarse_labels, jnp.int32)
        return {"base": {"proxies": proxies}}, {"coarse": coarse}

    def loss(
        self, params: dict, state: dict, outputs: Outputs, batch: Batch
    ) -> tuple[Loss, tuple[dict, Metrics]]:
        """Loss of a batch, see `Objective.loss`."""
        softmax, metrics = self.base.loss(params["base"], outputs, batch)
        points, labels = self.space.embed(outputs.projected), jnp.asarray(batch.labels)
        # An image must be as near to itself as it is: products would lose digits.
        compared = {"space": self.space, "samples_per_class": self.samples_per_class or 1}
        similarities = similarity(compare_images(points, labels, **compared).distances)
        of_levels = jnp.vstack([labels, jnp.asarray(state["coarse"])[:, labels]])
        hap = smooth_hap(
            similarities,
            relevances(of_levels, self.alpha),
            temperature=self.rank_temperature,
            slope=self.slope,
            margin=self.margin,
        )
        metrics |= {"hap_loss": hap, "softmax_loss": softmax}
        return self.weight * hap + (1 - self.weight) * softmax, (state, metrics)
