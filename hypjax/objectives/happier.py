"""HAPPIER: average precision graded by a hierarchy of labels (Ramzi et al., ECCV 2022).

A query's class should come first, then the other classes of its coarse class. The paper compares
images by the cosine; on other spaces than the sphere, hypjax uses `comparisons.similarity`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, Field, at_least, within
from hypjax.geometry import Space
from hypjax.geometry.arithmetic import AnyArray
from hypjax.objectives.base import Extension, Group, LossResult, LossSettings, ProblemSizes, declare
from hypjax.objectives.comparisons import compare_images, similarity
from hypjax.objectives.proxy_losses import PROXY_LOSSES, ProxyObjective, proxy_parameters
from hypjax.types import Batch, Outputs

_SOFTMAX = PROXY_LOSSES["normalized_softmax"]
_COMPARISONS = 2**24  # Triples (query, k, j) that are compared at once, 64 MB per array.


def relevances(labels: Int[AnyArray, "levels n"], alpha: float = 1.0) -> Float[Array, "n n"]:
    """Relevance of each image (column) for each query (row); every image is also a query.

    An image of level l shares exactly l of the query's L labels. Its relevance is
    (l/L)^α / |Ω^(l)|, with α = `alpha`, where Ω^(l) holds the batch's images of level l; the query
    itself is in Ω^(L). The released code divides l by L − 1: the loss cancels the factor.
    """
    levels = jnp.arange(1, len(labels) + 1)
    shared = jnp.sum(labels[:, :, None] == labels[:, None], axis=0)
    has_level = shared[..., None] == levels[None, None]
    counts = jnp.maximum(jnp.sum(has_level, axis=1, keepdims=True), 1)
    gains = (levels / len(labels)) ** alpha
    has_level, counts = (values.astype(gains.dtype) for values in (has_level, counts))
    return jnp.sum(gains[None, None] / counts * has_level, axis=-1)


def smooth_hap(
    similarities: Float[AnyArray, "queries n"],
    relevances: Float[AnyArray, "queries n"],
    *,
    rank_temperature: float = 0.01,
    slope: float = 100.0,
    margin: float = 0.05,
) -> Float[Array, ""]:
    """Smooth upper bound of 1 − H-AP within a batch (Ramzi et al., ECCV 2022; released code).

    H-AP of a query is (1/Σ rel)·Σ_k Hrank(k)/rank(k), over all images, the query included. In
    rank(k), an image j that is less relevant than k counts by a smooth step of t = s_j − s_k:
    σ(t/τ) up to 0, 0.5 + σ(t/τ) up to δ, and ρ·(t − δ) + 1.44 beyond. Other images count by the
    step H(t), with H(0) = 1; Hrank(k) = Σ_j min(rel(j), rel(k))·H(t). Only smooth steps have
    gradients. The released code compares levels instead of relevances, and so orders images of
    different levels even if their relevances are equal.

    `rank_temperature` is τ, `slope` ρ and `margin` δ. Rows of the matrices are queries, and columns
    are results. Takes O(n³) operations. Raises a `ValueError` if there is no image.
    """
    if not similarities.size:
        raise ValueError(f"needs one image or more, got similarities {similarities.shape}")

    @jax.checkpoint  # Otherwise the gradient holds all comparisons: 3 GB an array for 900 images.
    def average_precision(row: tuple[Float[Array, " n"], Float[Array, " n"]]) -> Float[Array, ""]:
        s, rel = row
        gaps = s[None] - s[:, None]  # s_j − s_k, with k along rows and j along columns.
        near = jax.nn.sigmoid(gaps / rank_temperature) + 0.5 * (gaps > 0).astype(s.dtype)
        smooth = jnp.where(gaps > margin, slope * (gaps - margin) + 1.44, near)
        less_relevant = rel[None] < (1 - 1e-5) * rel[:, None]  # By more than rounding.
        ranks = jnp.sum(jnp.where(less_relevant, smooth, (gaps >= 0).astype(s.dtype)), axis=1)
        hranks = jnp.sum(jnp.minimum(rel[None], rel[:, None]), axis=1, where=gaps >= 0)
        return jnp.sum(hranks / ranks) / jnp.sum(rel)

    block = max(1, _COMPARISONS // similarities.shape[1] ** 2)
    scores = lax.map(average_precision, (similarities, relevances), batch_size=block)
    return 1 - jnp.mean(scores)


@dataclasses.dataclass(frozen=True)
class Happier(Extension):
    """HAPPIER's loss: a weighted sum of `smooth_hap` and the base, a normalised softmax.

    An image's labels are its class and its coarse classes at each level.
    """

    base: ProxyObjective
    hap: Callable[..., Array]  # `smooth_hap` with its settings.
    weight: float  # Weight of `hap`; the softmax has 1 − weight.
    alpha: float  # Exponent of levels in relevances.

    @property
    def groups(self) -> Sequence[Group]:  # type: ignore[override]
        """The proxies, without weight decay, as in the released code."""
        return tuple(group._replace(weight_decay=0.0) for group in super().groups)

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns proxies, uniform in ±1/√dim as in the released code, and the coarse classes.

        Raises a `UserError` if the training classes have no coarse classes.
        """
        if not spec.coarse_labels:
            raise UserError("happier needs coarse classes: list coarse_labels of the dataset")
        bound = spec.head_dim**-0.5
        shape = spec.classes, spec.head_dim
        proxies = jax.random.uniform(key, shape, minval=-bound, maxval=bound)
        proxies = proxy_parameters(proxies, self.space, self.base.ball_c)
        return {"base": {"proxies": proxies}}, {"coarse": jnp.array(spec.coarse_labels, jnp.int32)}

    def loss(self, params: dict, state: dict, outputs: Outputs, batch: Batch) -> LossResult:
        """Loss of a batch, see `Objective.loss`."""
        softmax, metrics = self.base.loss(params["base"], outputs, batch)
        points, labels = self.space.embed(outputs.projected), jnp.asarray(batch.labels)
        # Subtraction keeps the digits by which an image is nearest to itself.
        samples = self.base.samples_per_class or 1
        pairs = compare_images(points, labels, space=self.space, samples_per_class=samples)
        levels = jnp.vstack([labels, jnp.asarray(state["coarse"])[:, labels]])
        hap = self.hap(similarity(pairs.distances), relevances(levels, self.alpha))
        metrics |= {"hap_loss": hap, "softmax_loss": softmax}
        return self.weight * hap + (1 - self.weight) * softmax, (state, metrics)


def _create(hap: Callable[..., Array], settings: LossSettings, space: Space) -> Happier:
    base, fields = _SOFTMAX.create(settings, space), settings.fields
    assert isinstance(base, ProxyObjective)
    return Happier(base, hap, fields["weight"], fields["alpha"])


# Defaults are the released code's.
HAPPIER = declare(
    smooth_hap,
    {"rank_temperature": ABOVE_0, "slope": at_least(0), "margin": at_least(0)},
    build=_create,
    shared={"weight": Field(0.9, within(0, 1)), "alpha": Field(1.0, at_least(0))} | _SOFTMAX.fields,
)
