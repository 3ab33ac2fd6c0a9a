"""Entailment cones: the loss beside another one, its apexes and coarse classes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Lorentz, Space, cones
from hypjax.objectives import OBJECTIVES, Group, Objective, ProblemSizes
from tests.helpers.losses import loss_of, objective

NAME = "cones+normalized_softmax"
COARSE = (1, 0, 1, 2)
LABELS = np.array([0, 0, 1, 1, 2, 2, 3, 3])
KEY, STEPS = jax.random.key(0), {"steps": 0}
SPEC = ProblemSizes(4, 2, 16, 5, 100, len(LABELS), coarse_labels=(COARSE,))


@dataclasses.dataclass(frozen=True)
class Counting(Objective):
    """A loss that counts its steps, and is quick to compile."""

    space: Space

    def loss(self, state, outputs):
        return jnp.sum(outputs.projected), ({"steps": state["steps"] + 1}, {"own": jnp.ones(())})


@pytest.mark.parametrize("space", ["poincare", "lorentz"])
def test_it_adds_the_mean_angle_outside_the_cone_of_the_coarse_class(space):
    fields = {"cone_weight": 0.7, "cone_radius": 0.05, "cone_negatives": 0.3, "cone_margin": 0.2}
    built = objective(NAME, space=space, **fields)
    params, state = built.init(KEY, SPEC)
    assert built.space == built.score_space == built.base.space
    built, state = dataclasses.replace(built, base=Counting(built.space)), state | {"base": STEPS}
    features = np.random.default_rng(0).normal(size=(len(LABELS), 5)).astype(np.float32)
    features[0] = 2 * params["apexes"][1]  # Behind the apex of its coarse class.

    @jax.jit
    def compute(params, features):
        return loss_of(built, (params, state), features, LABELS, key=KEY)

    loss, (after, metrics) = compute(params, features)

    @jax.jit
    def angles_outside(apexes, features):
        apexes, points = map(Lorentz(0.1, 2.3).embed, (apexes, features))
        angles = cones.exterior_angle(apexes, points[:, None], 0.1)
        return angles - cones.half_aperture(apexes, 0.1, 0.05)[None]

    own = np.array(COARSE)[LABELS][:, None] == np.arange(3)
    outside = np.asarray(angles_outside(params["apexes"], features))
    push = np.mean(np.maximum(0.2 - outside[~own], 0))
    expected = np.mean(np.maximum(outside[own], 0)) + 0.3 * push
    np.testing.assert_allclose(metrics["cone_loss"], expected, rtol=1e-5)
    assert metrics["cone_inside"] == np.mean(outside[own] <= 0) >= 1 / len(LABELS) and push > 0
    outside_others = np.mean(outside[~own] <= 0)
    np.testing.assert_allclose(metrics["cone_inside_others"], outside_others, rtol=1e-6)
    np.testing.assert_allclose(loss, np.sum(features) + 0.7 * metrics["cone_loss"], rtol=1e-5)
    assert after["base"]["steps"] == metrics["own"] == 1
    assert np.array_equal(after["coarse"], COARSE)


def test_apexes_start_with_half_apertures_of_45_degrees_and_have_a_rate_of_their_own():
    built = objective(NAME, proxy_rate=50.0, cone_rate=7.0, c=0.3)
    params, state = built.init(KEY, SPEC)
    assert params["apexes"].shape == (3, 5) and params["base"]["proxies"].shape == (4, 5)
    assert state["base"] == {} and state["coarse"].tolist() == list(COARSE)
    points = Lorentz(0.3, None).embed(params["apexes"])
    np.testing.assert_allclose(cones.half_aperture(points, 0.3), np.pi / 4, rtol=1e-5)
    assert built.groups == (Group(("base", "proxies"), rate=50.0), Group(("apexes",), rate=7.0))


def test_what_has_no_cones_is_refused():
    with pytest.raises(UserError, match="poincare or lorentz"):
        objective(NAME, space="sphere")
    with pytest.raises(UserError, match="raise c or clip_radius"):
        objective(NAME, c=1e-3)
    objective(NAME, c=1e-3, clip_radius=None)
    with pytest.raises(UserError, match="needs coarse classes"):
        objective(NAME).init(KEY, SPEC._replace(coarse_labels=()))

    class Comparing(Counting):
        towers = "images", "texts"

    with pytest.raises(UserError, match="Cones extends a loss of one tower, not of images and"):
        dataclasses.replace(objective(NAME), base=Comparing(Lorentz(0.1)))
    assert not {"cones+arcface", "cones+tuple_contrastive"} & {*OBJECTIVES}
