"""GET /metrics: what the server did, in the Prometheus text format.

Owns the names. Totals are counters that only grow; what may fall is a gauge. Every server has its own registry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from phloem.types import FinishReason, TextDelta

_GAUGES = frozenset(
    {"num_running", "num_waiting", "kv_num_nodes", "kv_num_tokens", "kv_num_tokens_pending", "kv_num_cursors"}
    | {"kv_num_pins", "kv_num_wants", "kv_num_namespaces", "kv_num_metadata_bytes"}
    | {f"kv_num_pages_{kind}" for kind in ("total", "free", "evictable", "protected", "pending", "pinned")}
)
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_TOTAL_BUCKETS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class ServerMetrics:
    """Times and counts of one server; updated on the event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._ttft = Histogram(
            "phloem_time_to_first_token_seconds",
            "From accepted request to first token of a choice.",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self._itl = Histogram(
            "phloem_inter_token_latency_seconds",
            "Between news of one choice, divided by the tokens in it.",
            buckets=_ITL_BUCKETS,
            registry=self._registry,
        )
        self._total = Histogram(
            "phloem_e2e_request_latency_seconds",
            "From accepted request to the end of a choice.",
            buckets=_TOTAL_BUCKETS,
            registry=self._registry,
        )
        self._choices = Counter(
            "phloem_choices", "Choices that ended, by reason.", ["finish_reason"], registry=self._registry
        )
        self._responses = Counter(
            "phloem_http_responses", "HTTP answers, by route and status.", ["route", "status"], registry=self._registry
        )

    def watch_engine(self, stats: Callable[[], Mapping[str, float]]) -> None:
        """Report an engine's numbers too, read at each scrape."""
        self._registry.register(_EngineCollector(stats))

    def count_response(self, route: str, status: int) -> None:
        """One HTTP answer; `route` is a route's pattern, never a client's path, so that labels stay few."""
        self._responses.labels(route, str(status)).inc()

    def clock(self, num_choices: int) -> RequestClock:
        """Times one request from now on."""
        return RequestClock(self, num_choices)

    def observe(self, delta: TextDelta, since_start_s: float, since_last_s: float, first: bool) -> None:
        """One delta of a choice with its times."""
        if delta.token_ids:
            if first:
                self._ttft.observe(since_start_s)
            else:
                self._itl.observe(since_last_s / len(delta.token_ids))
        if delta.finish_reason is not None:
            self._total.observe(since_start_s)
            self._choices.labels(FinishReason(delta.finish_reason).value).inc()

    def render(self) -> bytes:
        """The text that a scraper reads."""
        return generate_latest(self._registry)


class RequestClock:
    """Times of the choices of one request."""

    def __init__(self, metrics: ServerMetrics, num_choices: int) -> None:
        self._metrics = metrics
        self._start_s = time.monotonic()
        self._last_s: list[float | None] = [None] * num_choices

    def tick(self, choice: int, delta: TextDelta) -> None:
        """A delta of a choice came."""
        now_s = time.monotonic()
        last_s = self._last_s[choice]
        self._metrics.observe(delta, now_s - self._start_s, now_s - (last_s or now_s), last_s is None)
        if delta.token_ids:
            self._last_s[choice] = now_s


class _EngineCollector(Collector):
    """The engine's snapshot as metrics: `kv_num_pages_free` becomes `phloem_kv_pages_free`, a gauge never `_total`."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = dict(self._stats())
        if "num_prompt_tokens" in stats:
            stats["num_uncached_prompt_tokens"] = stats["num_prompt_tokens"] - stats.get("num_cached_prompt_tokens", 0)
        for name, value in stats.items():
            public = f"phloem_{name.replace('num_', '', 1)}"
            text = name.replace("_", " ")
            if name in _GAUGES:
                yield GaugeMetricFamily(public.removesuffix("_total"), f"Now: {text}.", value)
            else:
                yield CounterMetricFamily(public, f"Since the start: {text}.", value)
