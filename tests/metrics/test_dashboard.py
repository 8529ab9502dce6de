"""The dashboard queries only series that are exposed, with labels that they have."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest

from kvcache.metrics import METRICS, Kind
from tests.metrics.table import exposed_series

DASHBOARD: dict[str, Any] = json.loads(
    files("actors").joinpath("dashboards/kvcache_grafana.json").read_text("utf-8")
)
SERIES = re.compile(r"\b(ray_[a-z_]+)(?:\{([^}]*)\})?")
LABEL = re.compile(r'([a-z_]+)\s*=~?\s*"[^"]*"')
BY = re.compile(r"\b(?:by|on) \(([^)]*)\)")
LABELS = {
    series: {*metric.labels, *(("le",) if series.endswith("_bucket") else ())}
    for metric in METRICS
    for series in exposed_series(metric)
}
COUNTERS = {
    series for metric in METRICS if metric.kind is Kind.COUNTER for series in exposed_series(metric)
}


def panels() -> list[Any]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[Any]:
    return [
        pytest.param(target["expr"], target["legendFormat"], id=f"{panel['id']}{target['refId']}")
        for panel in panels()
        for target in panel["targets"]
    ]


def used(expr: str) -> list[tuple[str, set[str]]]:
    """Return the series of an expression, each with the labels that select it."""
    return [
        (name, {match[1] for match in LABEL.finditer(selector)})
        for name, selector in SERIES.findall(expr)
    ]


@pytest.mark.parametrize(("expr", "legend"), queries())
def test_every_query_asks_for_series_and_labels_that_there_are(expr: str, legend: str) -> None:
    asked = used(expr)
    assert asked and expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}")
    common = set.intersection(*(LABELS[name] for name, _ in asked))
    for name, labels in asked:
        assert labels <= LABELS[name], (name, labels - LABELS[name])
        assert "cluster" in labels
        if name in COUNTERS or name.endswith("_bucket"):
            assert re.search(rf"rate\({name}\b", expr), f"{name} only grows: ask for its rate"
    grouped = {label.strip() for found in BY.findall(expr) for label in found.split(",")}
    assert grouped <= common | {"le"}, grouped - common
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= common
    if "histogram_quantile" in expr:
        assert "le" in grouped and all(name.endswith("_bucket") for name, _ in asked)


def test_every_metric_of_ages_hits_and_latencies_is_shown() -> None:
    shown = {name for param in queries() for name, _ in used(param.values[0])}
    wanted = {series for series in LABELS if series.endswith("_bucket")}
    wanted |= {series for series in LABELS if "hit" in series and series.endswith("_total")}
    assert wanted <= shown


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_the_clusters_to_choose_from_are_those_that_report() -> None:
    (choice,) = [v for v in DASHBOARD["templating"]["list"] if v["name"] == "cluster"]
    match = re.fullmatch(r"label_values\((\w+), cluster\)", choice["query"]["query"])
    assert match is not None and match[1] in LABELS
