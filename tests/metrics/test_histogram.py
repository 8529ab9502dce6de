"""Buckets against their plain definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.metrics import Histogram, Kind, Metric

AGE = Metric("kvcache_age_seconds", Kind.HISTOGRAM, "Ages.", ("cluster",))


def test_each_bucket_counts_the_values_up_to_its_bound() -> None:
    rng = random.Random(5)
    bounds = (0.1, 1.0, 5.0)
    values = [rng.choice([*bounds, rng.uniform(0, 9)]) for _ in range(700)]
    one_by_one, at_once = Histogram(bounds), Histogram(bounds)
    for value in values:
        one_by_one.observe(value)
    assert one_by_one.sample(AGE, ("c",)) == one_by_one.sample(AGE, ("c",))
    at_once.observe_many(np.array(values))
    expected = [sum(v <= bound for v in values) for bound in (*bounds, float("inf"))]
    for histogram in (one_by_one, at_once):
        sample = histogram.sample(AGE, ("c",))
        assert list(sample.counts) == expected
        assert sample.count == len(values)
        assert sample.sum == pytest.approx(sum(values))


def test_a_count_that_is_undone_was_never_counted() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe_many(np.array([0.5, 2.0, 7.0]))
    histogram.observe_many(np.array([2.0]), -1)
    sample = histogram.sample(AGE)
    assert (sample.counts, sample.sum) == ((1, 1, 2), pytest.approx(7.5))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kvcache_steps", Kind.COUNTER),
        ("kvcache_blocks_total", Kind.GAUGE),
        ("kvcache_step_time", Kind.HISTOGRAM),
        ("steps_total", Kind.COUNTER),
        ("kvcache_Steps_total", Kind.COUNTER),
    ],
)
def test_names_against_the_conventions_are_refused(name: str, kind: Kind) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Metric(name, kind, "Something.")


def test_a_histogram_may_not_have_the_label_of_its_buckets() -> None:
    with pytest.raises(ConfigurationError, match="labels"):
        Metric("kvcache_age_seconds", Kind.HISTOGRAM, "Ages.", ("le",))
