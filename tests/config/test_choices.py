"""The names that a configuration accepts are the names that the rooms implement."""

from hypjax.config import choices
from hypjax.data.preparation.registry import BUILDERS
from hypjax.data.views import TEST_VIEWS, TRAIN_VIEWS
from hypjax.retrieval import metric_rules


def test_names_and_implementations_match():
    assert {*choices.DATASETS, choices.DISTRACTORS} == {"folder", *BUILDERS}
    assert {*choices.BENCHMARKS} < {*choices.DATASETS}
    assert choices.TRAIN_VIEWS == tuple(TRAIN_VIEWS)
    assert choices.TEST_VIEWS == tuple(TEST_VIEWS)
    assert set(choices.METRICS) == {*metric_rules.AT_K, *metric_rules.WITHOUT_K}
