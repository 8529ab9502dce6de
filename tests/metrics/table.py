"""The table of all metrics for the documentation, made from the declarations."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.metrics.metric import Kind, Metric


def markdown_table(metrics: Sequence[Metric]) -> str:
    """Return a row for each metric, with its name in Prometheus."""
    rows = ["| metric | kind | labels | |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(
            f"| `{exposed_name(metric)}` | {metric.kind.value} | {labels} | {metric.help} |"
        )
    return "\n".join(rows)


def exposed_name(metric: Metric) -> str:
    """Return a metric's name in Prometheus, as Ray exports it."""
    return f"ray_{metric.name}"


def exposed_series(metric: Metric) -> tuple[str, ...]:
    """Return the names of a metric's series; a histogram has several."""
    name = exposed_name(metric)
    if metric.kind is not Kind.HISTOGRAM:
        return (name,)
    return tuple(f"{name}_{part}" for part in ("bucket", "sum", "count"))
