"""What a configuration may name is what there is."""

from hypjax import geometry
from hypjax.config import choices
from hypjax.data.preparation.registry import BUILDERS
from hypjax.objectives import create
from hypjax.retrieval import metrics


def test_every_name_has_its_code_and_every_code_its_name():
    assert set(choices.OBJECTIVES) == set(create.OBJECTIVES)
    assert set(choices.SPACES) == set(geometry.SPACES)
    assert set(choices.DATASETS) == {"folder", *BUILDERS}
    assert set(choices.METRICS) == {*metrics.AT_K, *metrics.WITHOUT_K}
