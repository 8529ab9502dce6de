"""The declared metrics as a table for the documentation, so that it says what there is.

Refuses to describe: every word of it is a declaration's.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.metrics.metric import Kind, Metric


def markdown_table(metrics: Sequence[Metric]) -> str:
    """Return a row for each metric, with the name that Prometheus sees."""
    rows = ["| metric | kind | labels | |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(
            f"| `{exposed_name(metric)}` | {metric.kind.value} | {labels} | {metric.help} |"
        )
    return "\n".join(rows)


def exposed_name(metric: Metric) -> str:
    """Return the name under which Prometheus finds a metric that Ray exports."""
    return f"ray_{metric.name}"


def exposed_series(metric: Metric) -> tuple[str, ...]:
    """Return the names of a metric's series: of a histogram, those of its parts."""
    name = exposed_name(metric)
    if metric.kind is not Kind.HISTOGRAM:
        return (name,)
    return tuple(f"{name}_{part}" for part in ("bucket", "sum", "count"))
