"""Bootstrap intervals against closed forms, and choices among settings."""

import numpy as np
import pytest

from hypjax.analysis.tuning import bootstrap, candidates, print_choice, sums_by_class, tied


def sums(scores, labels):
    return sums_by_class(np.array(scores, float), np.array(labels))


def test_scores_are_summed_by_class_without_queries_that_have_no_match():
    totals, counts = sums([[1, 0, np.nan, 1], [0, 0, np.nan, 1]], [5, 5, 5, 2])
    assert totals.tolist() == [[1, 1], [1, 0]] and counts.tolist() == [1, 2]
    # Means weigh queries equally.
    (mean,), (difference,) = bootstrap([sums([[1, 0, 0, 0], [1, 1, 1, 0]], [0, 0, 0, 1])])
    assert mean[0] == 0.5 and not difference.any()


def test_an_interval_is_that_of_the_normal_distribution_if_there_are_many_classes():
    of_classes = np.random.default_rng(0).normal(0.5, 0.1, 400)
    ((_, *interval),), _ = bootstrap([sums([of_classes], np.arange(400))])
    error = of_classes.std() / 20
    expected = of_classes.mean() + np.array([-1.96, 1.96]) * error
    np.testing.assert_allclose(interval, expected, atol=0.1 * error)


def test_an_interval_spans_the_runs_if_classes_are_alike():
    """Of 2 runs, a quarter of the draws are the worse one twice, a quarter the better one."""
    (mean,), _ = bootstrap([sums([[0.2] * 9, [0.6] * 9], np.arange(9))])
    assert mean == pytest.approx((0.4, 0.2, 0.6))


def test_methods_are_compared_on_the_same_classes():
    """Both vary by class, their difference does not."""
    of_classes = np.random.default_rng(0).uniform(size=50)
    methods = [sums([of_classes - shift], np.arange(50)) for shift in (0, 0.25)]
    (_, (_, low, high)), (_, difference) = bootstrap(methods)
    assert high - low > 0.1
    assert difference == pytest.approx((-0.25, -0.25, -0.25))


@pytest.mark.parametrize(
    ("scores", "winners"), [((0.7, 0.7, 0.6), ["0.2", "0.1"]), ((0.5, 0.7, 0.8), ["0.3"])]
)
def test_among_equal_scores_the_setting_nearest_to_the_file_is_taken(scores, winners, capsys):
    grid = candidates("glyphs", (), "hyp objective.temperature=0.1,0.2,0.3")  # The file's is 0.2.
    scores = {setting: ("recall@1", score) for setting, score in zip(grid, scores, strict=True)}
    best = tied(grid, scores)
    assert [str(setting).partition("=")[2] for setting in best] == winners
    print_choice(scores, [best], "0")
    assert capsys.readouterr().out.count("tied") == 2 * (len(winners) > 1)
