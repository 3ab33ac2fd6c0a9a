"""Principal components beside scikit-learn."""

import numpy as np
import pytest

from hypjax.geometry import PoincareBall
from hypjax.retrieval.projection import fit


@pytest.mark.parametrize("whiten", [False, True])
def test_projections_are_those_of_scikit_learn(whiten):
    decomposition = pytest.importorskip("sklearn.decomposition", reason="needs scikit-learn")
    flat = PoincareBall(0.0, None)  # Its points are its features.
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(300, 24)) @ rng.normal(size=(24, 24)) + 1).astype(np.float32)
    expected = decomposition.PCA(8, whiten=whiten, svd_solver="full").fit(x.astype(np.float64))
    found = fit(x, space=flat, dim=8, whiten=whiten)
    np.testing.assert_allclose(found.variances, expected.explained_variance_, rtol=1e-9)
    signs = np.sign(np.sum(found.components * expected.components_, axis=1))
    np.testing.assert_allclose(found.components, signs[:, None] * expected.components_, atol=1e-9)
    projected = signs * expected.transform(x)
    if whiten:  # scikit-learn's have the variance 1.
        projected *= np.sqrt(found.variances.mean())
    np.testing.assert_allclose(found.apply(x), projected, atol=2e-4)
