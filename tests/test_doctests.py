"""Examples in docstrings print what they say."""

import doctest
import importlib

import pytest

MODULES = [
    *(f"geometry.{name}" for name in ("hyperbolic", "poincare", "sphere")),
    *(f"objectives.{name}" for name in ("pairwise", "pair_losses", "proxy_losses")),
    *(f"retrieval.{name}" for name in ("metrics", "neighbors")),
]


@pytest.mark.hygiene
@pytest.mark.parametrize("module", MODULES)
def test_examples_print_what_they_say(module):
    result = doctest.testmod(importlib.import_module(f"hypjax.{module}"))
    assert result.attempted > 0 and result.failed == 0
