"""Comparisons with other libraries, which are optional: tests without theirs are skipped."""

from benchmarks import peers  # noqa: F401  Lets a CPU build of torch import timm.
