"""The documentation's metrics are the declared ones."""

from __future__ import annotations

from pathlib import Path

from kvcache.metrics import METRICS
from tests.metrics.table import markdown_table

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def test_the_table_of_metrics_is_that_of_the_declarations() -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
    written = text.split("<!-- metrics -->")[1].split("<!-- end of metrics -->")[0]
    assert written.strip() == markdown_table(METRICS)


def test_every_metric_is_declared_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
