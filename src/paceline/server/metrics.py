"""What the server did, in the form that Prometheus reads. Names behind the prefix, and labels, are vLLM's; `drafter` is ours."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.engine.engine import EngineStats
from paceline.engine.open import OpenedEngine
from paceline.outputs import RequestOutput

PREFIX = "paceline:"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0, 1800.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """Histograms of finished requests, and the engine's own counters at the time of asking.

    Args:
        model: the name that is served.
    """

    def __init__(self, opened: OpenedEngine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(opened, model)
        self._registry.register(self._engine)
        self._model = model

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(PREFIX + name, text, ["model_name", "engine"], buckets=tuple(buckets), registry=self._registry)
            return made.labels(model, "0")

        self._first_token = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS)
        self._between = histogram("request_time_per_output_token_seconds", "Mean time between two tokens of a request.", _TOKEN_SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "From a request's arrival to its first pass.", _SECONDS)
        labels = ["model_name", "engine", "finished_reason"]
        self._finished = Counter(PREFIX + "request_success", "Samples that were finished.", labels, registry=self._registry)
        for reason in ("stop", "length"):
            self._finished.labels(model, "0", reason)

    def observe(self, output: RequestOutput, elapsed_s: float) -> None:
        """Count a finished sample; `elapsed_s` since its request arrived."""
        self._whole.observe(elapsed_s)
        self._first_token.observe(max(0.0, elapsed_s - output.timing.decode_s))
        self._queue.observe(max(0.0, elapsed_s - output.timing.total_s))
        if len(output.token_ids) > 1:
            self._between.observe(output.timing.decode_s / (len(output.token_ids) - 1))
        self._finished.labels(self._model, "0", output.finish_reason).inc()

    def text(self, stats: EngineStats) -> bytes:
        """The page."""
        self._engine.stats = stats
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's counters; speculation counts when a request has ended."""

    def __init__(self, opened: OpenedEngine, model: str) -> None:
        self._opened = opened
        self._labels = {"model_name": model, "engine": "0"}
        self.stats = EngineStats()

    def collect(self) -> Iterable[Metric]:
        stats, spoken = self.stats, self.stats.speculation
        pool = self._opened.engine.cache.pool
        yield self._gauge("num_requests_running", "Samples that take part in passes.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Samples that wait for room in the engine.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1.", 1.0 - pool.num_free / pool.num_blocks)
        yield self._counter("prompt_tokens", "Prompt tokens of finished samples.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Output tokens of finished samples.", stats.completion_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens that were looked for in the cache.", stats.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens whose rows were there.", stats.num_cached_tokens)
        yield self._counter("num_preemptions", "How often a request's rows were dropped to make room.", stats.num_preemptions)
        yield self._counter("engine_steps", "Passes of the target.", stats.num_steps)
        yield self._counter("request_failures", "Samples that failed by themselves.", stats.num_failed)
        yield self._counter("request_aborts", "Samples that were given up.", stats.num_aborted)
        drafter = {"drafter": self._opened.drafter_name}
        drafts = spoken.steps - spoken.plain_steps
        yield self._counter("spec_decode_num_drafts", "Steps with drafts.", drafts, drafter)
        yield self._counter("spec_decode_num_draft_tokens", "Drafted tokens.", spoken.drafted, drafter)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were kept.", spoken.accepted, drafter)
        yield self._counter("drafter_failures", "How often the drafter failed; the steps were plain.", stats.drafter_failures, drafter)
        by_position = self._family("spec_decode_num_accepted_tokens_per_pos", "Kept tokens by depth from 0.", ("drafter", "position"))
        for position, accepted in enumerate(spoken.accepted_by_position):
            by_position.add_metric([*self._labels.values(), self._opened.drafter_name, str(position)], accepted)
        yield by_position
        by_reason = self._family("plain_steps", "Steps without drafts, by reason.", ("reason",))
        for reason, count in spoken.plain.items():
            by_reason.add_metric([*self._labels.values(), reason.name.lower()], count)
        yield by_reason

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float, more: Mapping[str, str] | None = None) -> Metric:
        labels = {**self._labels, **(more or {})}
        family = CounterMetricFamily(PREFIX + name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _family(self, name: str, text: str, more: tuple[str, ...]) -> CounterMetricFamily:
        return CounterMetricFamily(PREFIX + name, text, labels=[*self._labels, *more])
