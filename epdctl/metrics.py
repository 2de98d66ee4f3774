"""All metrics of epdctl, declared once; `docs/operations.md` says what to do about each (tested).

Rules of this file: names are an interface; base units; no URL, request id or client-chosen text is a label.
A process builds one of these classes and hands it down: there is no global registry.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STAGE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FAST_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class ControlMetrics:
    """What `epdctl serve` counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "epdctl_requests_total",
            "Finished requests.",
            ["route", "topology", "outcome"],
            registry=r,
        )
        self.stage_seconds = Histogram(
            "epdctl_stage_seconds",
            "Time a request spent in a stage.",
            ["stage"],
            buckets=_STAGE_BUCKETS_S,
            registry=r,
        )
        self.in_flight = Gauge("epdctl_in_flight", "Calls under way in a stage.", ["stage"], registry=r)
        self.instances = Gauge("epdctl_instances", "Registered instances.", ["role", "state"], registry=r)
        self.transitions = Counter(
            "epdctl_instance_transitions_total", "Instance state changes.", ["role", "event"], registry=r
        )
        self.probe_seconds = Histogram(
            "epdctl_probe_seconds", "Health probes.", ["outcome"], buckets=_FAST_BUCKETS_S, registry=r
        )
        self.retries = Counter(
            "epdctl_retries_total", "Attempts after the first.", ["stage", "reason"], registry=r
        )
        self.cancels = Counter("epdctl_cancels_total", "Legs cancelled.", ["stage"], registry=r)
        self.dropped_client_params = Counter(
            "epdctl_dropped_client_params_total",
            "Routing headers and transfer parameters removed from client requests.",
            ["name"],
            registry=r,
        )

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)


class WorkerMetrics:
    """What a bundled worker counts; the engine process reports its share to the front."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "epdctl_requests_total", "Finished requests.", ["route", "topology", "outcome"], registry=r
        )
        self.in_flight = Gauge("epdctl_in_flight", "Calls under way in a stage.", ["stage"], registry=r)
        self.retries = Counter(
            "epdctl_retries_total", "Attempts after the first.", ["stage", "reason"], registry=r
        )
        self.ec_transfers = Counter(
            "epdctl_ec_transfers_total", "Embedding transfers ended.", ["side", "outcome"], registry=r
        )
        self.ec_unsent = Counter(
            "epdctl_ec_unsent_total",
            "Embeddings that failed before their consumer was asked for space, by why.",
            ["reason"],
            registry=r,
        )
        self.ec_bytes = Counter("epdctl_ec_bytes_total", "Embedding bytes moved.", ["side"], registry=r)
        self.ec_seconds = Histogram(
            "epdctl_ec_seconds",
            "Time of an embedding transfer.",
            ["side"],
            buckets=_FAST_BUCKETS_S,
            registry=r,
        )
        self.encode_batch_items = Histogram(
            "epdctl_encode_batch_items",
            "Items in a tower forward.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=r,
        )
        self.encode_seconds = Histogram(
            "epdctl_encode_seconds", "Time of a tower forward.", buckets=_STAGE_BUCKETS_S, registry=r
        )
        self.encode_queue_seconds = Histogram(
            "epdctl_encode_queue_seconds",
            "Wait of an item for its forward.",
            buckets=_FAST_BUCKETS_S,
            registry=r,
        )
        self.cache_requests = Counter(
            "epdctl_cache_requests_total", "Embedding cache look-ups.", ["tier", "result"], registry=r
        )
        self.cache_bytes = Gauge(
            "epdctl_cache_bytes", "Bytes held by the embedding cache.", ["tier"], registry=r
        )
        self.cache_evictions = Counter(
            "epdctl_cache_evictions_total", "Embeddings evicted from the cache.", ["tier"], registry=r
        )
        self.store_publications = Counter(
            "epdctl_store_publications_total",
            "Embeddings offered to the shared store, by what became of them.",
            ["outcome"],
            registry=r,
        )
        self.steps = Counter("epdctl_steps_total", "Forward steps of the language engine.", registry=r)
        self.step_seconds = Histogram(
            "epdctl_step_seconds",
            "Time of a language engine's step.",
            buckets=_FAST_BUCKETS_S,
            registry=r,
        )
        self.step_sequences = Histogram(
            "epdctl_step_sequences",
            "Sequences computed together in a step.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=r,
        )
        self.generated_tokens = Counter("epdctl_generated_tokens_total", "Tokens generated.", registry=r)
        self.sequences = Gauge(
            "epdctl_sequences", "Sequences running, and requests waiting to.", ["state"], registry=r
        )
        self.kv_bytes = Gauge(
            "epdctl_kv_bytes", "Bytes of key/value memory by what they are doing.", ["state"], registry=r
        )
        self.kv_transfers = Counter(
            "epdctl_kv_transfers_total", "Hand-overs of a prompt's KV ended.", ["side", "outcome"], registry=r
        )
        self.kv_transfer_bytes = Counter(
            "epdctl_kv_transfer_bytes_total", "KV bytes moved by Mooncake.", ["side"], registry=r
        )
        self.kv_transfer_seconds = Histogram(
            "epdctl_kv_transfer_seconds",
            "Time of a KV hand-over.",
            ["side"],
            buckets=_FAST_BUCKETS_S,
            registry=r,
        )
        self.tower_graphs = Gauge(
            "epdctl_tower_compiled_graphs",
            "Graphs of the vision tower that torch.compile has made code of; 0: the tower is not compiled.",
            registry=r,
        )
        self.arena_bytes = Gauge(
            "epdctl_arena_bytes",
            "Bytes of the registered arena by what they are doing.",
            ["state"],
            registry=r,
        )

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)
