"""Steps as spans, in OpenTelemetry's own memory."""

from __future__ import annotations

import time

import pytest

from actors.coordinator_metrics import span_maker
from kvcache.metrics import StepTimes


def test_a_span_lasts_from_arrival_until_every_rank_has_applied_the_step() -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel-sdk is missing")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    simple = pytest.importorskip("opentelemetry.sdk.trace.export")
    spans, provider = export.InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(simple.SimpleSpanProcessor(spans))
    make_span = span_maker("chat", provider.get_tracer("test"))
    now_s = time.monotonic()
    make_span(StepTimes("c", 7, 2, 9, now_s, now_s + 0.1, now_s + 0.2, now_s + 0.5))
    (span,) = spans.get_finished_spans()
    assert span.name == "kvcache.protocol.step"
    assert span.end_time - span.start_time == pytest.approx(5e8, abs=1e3)
    assert [event.name for event in span.events] == ["begun", "decided"]
    assert dict(span.attributes) == {
        "kvcache.cluster": "chat",
        "kvcache.client": "c",
        "kvcache.protocol.step": 7,
        "kvcache.epoch": 2,
        "kvcache.seq": 9,
    }
