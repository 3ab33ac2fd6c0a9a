"""Comparisons with other libraries, which are optional: tests without theirs are skipped."""

import sys

import pytest

from benchmarks import peers  # noqa: F401  Lets a CPU build of torch import timm.


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Lets PyTorch compute with one thread: several are slower for products this small."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
