"""The declarations of all metrics: names, kinds, labels and help texts.

The table of docs/operations.md is made from these, the dashboard is checked against them, and
collecting code refers to them. Ray puts `ray_` before each name, and adds labels of its own. Units
and suffixes follow Prometheus' conventions.
"""

from __future__ import annotations

from kvcache.metrics.metric import Kind, Metric


def _counter(name: str, says: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, says, ("cluster", *labels))


def _gauge(name: str, says: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, says, ("cluster", *labels))


def _histogram(name: str, says: str, *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, says, ("cluster", *labels))


# --- the coordinator: blocks and their contents

BLOCKS = _gauge(
    "kvcache_blocks",
    "Device blocks by state: in_use (by requests, pins or transfers) or free (also cached ones).",
    "state",
)
CACHED_BLOCKS = _gauge(
    "kvcache_cached_blocks", "Device blocks whose content can be hit, in use or not."
)
SEALED_BLOCKS = _gauge(
    "kvcache_sealed_blocks", "Cached device blocks whose bytes are complete on every rank."
)
PINNED_BLOCKS = _gauge("kvcache_pinned_blocks", "Device blocks held by pins.")
USAGE = _gauge("kvcache_usage_ratio", "Share of the device blocks that are in use, 0 to 1.")
QUERIED_TOKENS = _counter(
    "kvcache_query_tokens_total", "Tokens of admitted requests that read the cache."
)
HIT_TOKENS = _counter(
    "kvcache_hit_tokens_total",
    "Tokens that were hit, by the tier that had them: device, host or disk; of a vLLM engine also "
    "node, the memory of another node.",
    "tier",
)
EVICTIONS = _counter("kvcache_evicted_blocks_total", "Cached device blocks that were evicted.")
MERGED = _counter(
    "kvcache_merged_blocks_total", "Blocks that were merged into another one of equal content."
)
HIT_AGE = _histogram(
    "kvcache_hit_age_seconds",
    "How long blocks had been out of use when they were hit, each block counted once.",
)
EVICTION_AGE = _histogram(
    "kvcache_eviction_age_seconds",
    "How long blocks had been out of use when they were evicted. If this is about as long as "
    "kvcache_hit_age_seconds, or shorter, the cache is too small.",
)

# --- the coordinator: requests, steps, errors

REQUESTS = _gauge("kvcache_requests", "Requests by state: running or preempted.", "state")
CLIENTS = _gauge("kvcache_clients", "Attached clients.")
PINS = _gauge("kvcache_pins", "Present pins.")
PREEMPTIONS = _counter("kvcache_preemptions_total", "Requests that engines have preempted.")
STEPS = _counter(
    "kvcache_steps_total", "Steps and calls by outcome: executed or refused.", "outcome"
)
NO_ROOM = _counter(
    "kvcache_no_room_total",
    "Requests that found no blocks or no slot (`StepResult.no_room`). A request that is sent again "
    "counts in each step.",
)
STEP_QUEUE = _histogram(
    "kvcache_step_queue_seconds",
    "From the arrival of a step at the coordinator until its decision: 0 unless ranks are slow. "
    "One step in 31 is measured, also for the next two.",
)
STEP_DECISION = _histogram(
    "kvcache_step_decision_seconds", "The coordinator's own time for a step, without transport."
)
STEP_APPLIED = _histogram(
    "kvcache_step_applied_seconds",
    "From the arrival of a step at the coordinator until every rank has applied it.",
)
UNACKNOWLEDGED = _gauge(
    "kvcache_unacknowledged_messages", "Command messages that some rank has not applied."
)
RESENT = _counter("kvcache_resent_messages_total", "Command messages that were sent again.")
ERRORS = _counter(
    "kvcache_errors_total",
    "Refusals and errors, by kind: refused_step, failed_forward, failed_step_report, "
    "dropped, unattached, wrong_block, lost_record; of tiers failed_job, expired_job, "
    "load_given_up, disk_rest; of the message loop malformed, impersonated, refused_message, "
    "unsendable, early, foreign, undeliverable, refused_connection, disconnection, fault.",
    "kind",
)
EPOCH = _gauge("kvcache_epoch", "The coordinator's epoch; it rises with every loss of a process.")
IS_RUNNING = _gauge("kvcache_running", "1 while every rank obeys and steps are served, else 0.")

# --- the coordinator: tiers below the device

TIER_BLOCKS = _gauge(
    "kvcache_tier_blocks",
    "Blocks of a tier by state: capacity, ready, pending (being stored) or held (being read).",
    "tier",
    "state",
)
TIER_LOOKUPS = _counter(
    "kvcache_tier_lookups_total",
    "Keys looked up in a tier, by result: hit or miss.",
    "tier",
    "result",
)
TIER_OPERATIONS = _counter(
    "kvcache_tier_operations_total",
    "Blocks of a tier by operation: stored, failed, loaded, evicted, forgotten, skipped "
    "(not seen often enough) or refused (no room).",
    "tier",
    "operation",
)
TIER_BYTES = _counter(
    "kvcache_tier_moved_bytes_total",
    "Bytes of one rank, by direction: stored or loaded.",
    "tier",
    "direction",
)
TIER_JOBS = _gauge("kvcache_tier_jobs", "Unfinished copies between tiers, by kind.", "kind")
LOAD_WAITERS = _gauge(
    "kvcache_load_waiting_requests", "Requests that wait for their prefixes to be loaded."
)
LOAD_WAIT = _counter(
    "kvcache_load_wait_seconds_total",
    "Seconds that requests of a vLLM engine waited, by cause: files (to be read) or load.",
    "cause",
)

# --- tenants, if configured

TENANT_BLOCKS = _gauge(
    "kvcache_tenant_blocks",
    "Blocks of a tenant in a tier by state: held (all); cached (those not in use); "
    "pinned; guaranteed; limit. Tenants beyond metrics.max_tenants are 'other' together.",
    "tenant",
    "tier",
    "state",
)
TENANT_QUERIED_TOKENS = _counter(
    "kvcache_tenant_query_tokens_total", "As kvcache_query_tokens_total, by tenant.", "tenant"
)
TENANT_HIT_TOKENS = _counter(
    "kvcache_tenant_hit_tokens_total",
    "Tokens of a tenant that were hit on the device, including loaded ones.",
    "tenant",
)
TENANT_TIER_QUERIED_TOKENS = _counter(
    "kvcache_tenant_tier_query_tokens_total",
    "Tokens of a tenant's admitted requests that no tier above had.",
    "tenant",
    "tier",
)
TENANT_TIER_HIT_TOKENS = _counter(
    "kvcache_tenant_tier_hit_tokens_total",
    "Tokens of a tenant that were loaded from a tier below the device.",
    "tenant",
    "tier",
)
TENANT_EVICTIONS = _counter(
    "kvcache_tenant_evicted_blocks_total", "Blocks of a tenant that were evicted.", "tenant", "tier"
)
TENANT_REFUSALS = _counter(
    "kvcache_tenant_refusals_total", "How often a tenant found no room.", "tenant", "tier"
)

# --- every rank

WORKER_APPLIED = _gauge(
    "kvcache_worker_applied_seq", "Number of the last message that a rank applied.", "rank"
)
WORKER_FORWARDS = _counter("kvcache_worker_forwards_total", "Forwards that a rank ran.", "rank")
WORKER_LABELS = _gauge("kvcache_worker_labelled_blocks", "Labelled blocks of a rank.", "rank")
WORKER_POOL = _gauge("kvcache_worker_memory_bytes", "Memory of a rank by tier.", "rank", "tier")
WORKER_BLOCKS = _counter(
    "kvcache_worker_blocks_total", "Device blocks copied or zeroed on a rank.", "rank", "operation"
)
COPIED_BYTES = _counter(
    "kvcache_copied_bytes_total",
    "Bytes that a rank moved between tiers, by kind: store, load, spill or fetch.",
    "rank",
    "kind",
)
COPY_SECONDS = _counter(
    "kvcache_copy_seconds_total",
    "Total time of such copies, from command to report; bytes divided by it are the throughput.",
    "rank",
    "kind",
)
COPY_JOBS = _counter(
    "kvcache_copy_jobs_total",
    "Copies between tiers that have ended, by kind and outcome: good or failed.",
    "rank",
    "kind",
    "outcome",
)
WORKER_MESSAGES = _counter(
    "kvcache_worker_messages_total",
    "Messages of a rank by direction: sent or received.",
    "rank",
    "direction",
)
WORKER_ERRORS = _counter(
    "kvcache_worker_errors_total",
    "Errors of a rank, by kind: failed_job, invalid, foreign, malformed, undeliverable, "
    "refused_report, fault.",
    "rank",
    "kind",
)

_DECLARED = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
WORKER_METRICS = tuple(metric for metric in _DECLARED if "rank" in metric.labels)
COORDINATOR_METRICS = tuple(
    metric for metric in _DECLARED if metric is not LOAD_WAIT and metric not in WORKER_METRICS
)
ENGINE_METRICS: tuple[Metric, ...] = (
    *(QUERIED_TOKENS, HIT_TOKENS, LOAD_WAITERS, LOAD_WAIT, ERRORS),
    *(TIER_BLOCKS, TIER_LOOKUPS, TIER_OPERATIONS, TIER_BYTES, TIER_JOBS),
)
"""Of an engine that runs our tiers without a cluster."""

METRICS: tuple[Metric, ...] = COORDINATOR_METRICS + WORKER_METRICS
