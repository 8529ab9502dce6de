"""Reads Prometheus' text format with Prometheus' own client."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Series:
    """One line of an exposition."""

    name: str
    labels: dict[str, str]
    value: float


def parse_exposition(text: str) -> list[Series]:
    """Return every line with a value; raises ValueError for an invalid line."""
    return [
        Series(sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
