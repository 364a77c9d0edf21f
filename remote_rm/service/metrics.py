"""What Prometheus reads at GET /metrics."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from remote_rm.service.judge import Judge
from remote_rm.service.middleware import RequestRecord

KNOWN_PATHS = frozenset(("/get_reward", "/health", "/metrics", "/docs", "/redoc", "/openapi.json"))
"""Others are counted together: anyone can ask for any path."""
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITEM_KINDS = ("quick", "worker", "timed_out", "failed")


class ServiceMetrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self, judge: Judge) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_JudgeCollector(judge))
        self._requests = Counter(
            "remote_rm_requests", "Requests answered.", ("path", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "remote_rm_request_seconds",
            "Time from the head of a /get_reward request to the end of its reply.",
            buckets=LATENCY_BUCKETS,
            registry=self._registry,
        )

    def count(self, record: RequestRecord) -> None:
        """Add one answered request."""
        path = record.path if record.path in KNOWN_PATHS else "other"
        self._requests.labels(path, str(record.status)).inc()
        if record.path == "/get_reward":
            self._seconds.observe(record.seconds)

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _JudgeCollector(Collector):
    """Reads the judge's own counts at the time of asking."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def collect(self) -> Iterator[Metric]:
        """Yield the families of metrics."""
        items = CounterMetricFamily("remote_rm_items", "Items judged, by where that ended.", labels=("kind",))
        for kind in ITEM_KINDS:
            items.add_metric((kind,), getattr(self._judge.counts, kind))
        yield items
        yield CounterMetricFamily(
            "remote_rm_lost_workers", "Workers killed from outside.", value=self._judge.counts.lost_workers
        )
        yield GaugeMetricFamily("remote_rm_queued_items", "Items that wait for a worker.", value=self._judge.waiting)
        yield GaugeMetricFamily("remote_rm_busy_items", "Items that are with a worker.", value=self._judge.busy)
        yield GaugeMetricFamily("remote_rm_workers", "Worker processes alive.", value=self._judge.workers)
