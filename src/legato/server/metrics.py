"""Prometheus metrics: the engine's counts as they are when somebody asks, and how long requests took."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from legato.engine.engine import EngineStats
from legato.request import GenerationOutput

_GAUGES = {
    "num_running": "Requests that run.",
    "num_waiting": "Requests that wait.",
    "num_offloaded": "Requests whose blocks are on the host.",
    "num_batch_tokens": "Tokens of the latest forward pass.",
    "cache_used_share": "Share of the cache that requests own, 0 to 1.",
}
_COUNTERS = {
    "num_steps": "Forward passes.",
    "num_generated_tokens": "New tokens.",
    "num_prompt_tokens": "Prompt tokens computed.",
    "num_cached_tokens": "Prompt tokens found in the cache.",
    "num_draft_tokens": "Tokens guessed ahead.",
    "num_accepted_tokens": "Guesses that were right.",
    "num_finished": "Requests that ended.",
    "num_resets": "Soft resets.",
    "num_offloads": "Times a request's blocks went to the host.",
    "num_evicted_blocks": "Cached blocks that had to go.",
}
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """What `/metrics` tells.

    Args:
        stats: the engine as its latest step left it.
    """

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self._ttft = Histogram(
            "legato_time_to_first_token_seconds",
            "From a request to its first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._inter = Histogram(
            "legato_inter_token_seconds",
            "Mean time between a request's tokens.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._whole = Histogram(
            "legato_request_seconds", "From a request to its end.", buckets=_SECONDS, registry=self._registry
        )
        self._ends = Counter(
            "legato_requests_total", "Requests by how they ended.", ["finish_reason"], registry=self._registry
        )

    def finished(self, output: GenerationOutput) -> None:
        """A final output, with its timestamps."""
        self._ends.labels(output.finish_reason or "none").inc()
        times, created = output.timestamps or [], output.created_time
        if times:
            self._ttft.observe(times[0] - created)
            self._whole.observe(times[-1] - created)
        if len(times) > 1:
            self._inter.observe((times[-1] - times[0]) / (len(times) - 1))

    def cancelled(self, number: int) -> None:
        """So many requests' call ended before they did."""
        self._ends.labels("cancelled").inc(number)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return bytes(generate_latest(self._registry))


class _EngineCollector:
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, help_text in _GAUGES.items():
            yield GaugeMetricFamily(f"legato_{name.removeprefix('num_')}", help_text, value=getattr(stats, name))
        for name, help_text in _COUNTERS.items():
            yield CounterMetricFamily(f"legato_{name.removeprefix('num_')}", help_text, value=getattr(stats, name))
