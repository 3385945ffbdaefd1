"""Metrics in Prometheus's text form. Names after the prefix, and labels, are vLLM's; `drafter` is our own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paceline.engine.async_engine import AsyncEngine
from paceline.engine.engine import LATENCY_BUCKETS_S, EngineStats
from paceline.outputs import RequestOutput

PREFIX = "paceline:"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0, 1800.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_LABELS = ["model_name", "engine"]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The counters of a model's engine. Those of a model that was unloaded stay until it is loaded again and counts from 0.

    Attributes:
        cache_usage: share of the cache's blocks in use, 0 to 1.
        num_loads: how often it was loaded.
    """

    stats: EngineStats = field(default_factory=EngineStats)
    drafter: str = "none"
    cache_usage: float = 0.0
    is_loaded: bool = False
    num_loads: int = 0

    @classmethod
    async def of(cls, engine: AsyncEngine, num_loads: int) -> "EngineSnapshot":
        """Return the counters of a loaded engine."""
        stats, pool = await engine.stats(), engine.loaded.engine.cache.pool
        return cls(stats, engine.loaded.drafter_name, 1.0 - pool.num_free / pool.num_blocks, is_loaded=True, num_loads=num_loads)

    def unloaded(self) -> "EngineSnapshot":
        """The same after the engine was closed."""
        return replace(self, stats=replace(self.stats, num_running=0, num_waiting=0), cache_usage=0.0, is_loaded=False)


class Metrics:
    """Records histograms of finished requests, and renders them with the engines' counters for Prometheus.

    Args:
        models: names of the served models, the label `model_name`.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._registry = CollectorRegistry()
        self._engines = _EngineCollector()
        self._registry.register(self._engines)
        self._models = models

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(PREFIX + name, text, _LABELS, buckets=tuple(buckets), registry=self._registry)

        self.first_token = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS)
        self.between = histogram("request_time_per_output_token_seconds", "Mean time between two tokens of a request.", LATENCY_BUCKETS_S)
        self.whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", _SECONDS)
        self.queue = histogram("request_queue_time_seconds", "From a request's arrival to its first pass.", _SECONDS)
        self.prefill = histogram("request_prefill_time_seconds", "From a sample's first pass to its first token.", _SECONDS)
        self.decode = histogram("request_decode_time_seconds", "From a sample's first token to its last.", _SECONDS)
        self.inference = histogram("request_inference_time_seconds", "From a sample's first pass to its last token.", _SECONDS)
        self.prompt = histogram("request_prompt_tokens", "Prompt tokens of a sample.", _TOKENS)
        self.generated = histogram("request_generation_tokens", "Output tokens of a sample.", _TOKENS)
        labels = [*_LABELS, "finished_reason"]
        self.finished = Counter(PREFIX + "request_success", "Samples that were finished.", labels, registry=self._registry)
        labels = [*_LABELS, "adapter", "finished_reason"]
        self.adapters = Counter(PREFIX + "adapter_requests", "Samples that an adapter finished.", labels, registry=self._registry)
        labels = [*_LABELS, "route", "status"]
        self._answers = Counter(PREFIX + "http_requests", "HTTP responses.", labels, registry=self._registry)
        self.of_model = {model: ModelMetrics(self, model) for model in models}

    def count_response(self, route: str | None, status: int | None, model: str | None) -> None:
        """Count a response.

        Args:
            route: None = none matched, or the middleware refused the request.
            model: that the request was for; None = for none of several.
        """
        only = self._models[0] if len(self._models) == 1 else ""
        self._answers.labels(model or only, "0", route or "none", str(status or 0)).inc()

    def text(self, engines: Mapping[str, EngineSnapshot]) -> bytes:
        """Return the metrics as text.

        Args:
            engines: of all models, by their names.
        """
        self._engines.engines = engines
        return generate_latest(self._registry)


class ModelMetrics:
    """Records the finished requests of one model."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        for histogram in (
            *(metrics.first_token, metrics.between, metrics.whole, metrics.queue, metrics.prefill, metrics.decode),
            *(metrics.inference, metrics.prompt, metrics.generated),
        ):
            histogram.labels(model, "0")
        for reason in ("stop", "length"):
            metrics.finished.labels(model, "0", reason)

    def observe(self, output: RequestOutput, elapsed_s: float, adapter: str | None = None) -> None:
        """Count a finished sample of a request that arrived `elapsed_s` ago and names `adapter`."""
        metrics, timing = self._metrics, output.timing
        found = [
            (metrics.whole, elapsed_s),
            (metrics.first_token, max(0.0, elapsed_s - timing.decode_s)),
            (metrics.queue, max(0.0, elapsed_s - timing.total_s)),
            (metrics.prefill, timing.prompt_s),
            (metrics.decode, timing.decode_s),
            (metrics.inference, timing.total_s),
            (metrics.prompt, output.usage.prompt_tokens),
            (metrics.generated, len(output.token_ids)),
        ]
        if len(output.token_ids) > 1:
            found.append((metrics.between, timing.decode_s / (len(output.token_ids) - 1)))
        for histogram, value in found:
            histogram.labels(self._model, "0").observe(value)
        metrics.finished.labels(self._model, "0", output.finish_reason).inc()
        if adapter is not None:
            metrics.adapters.labels(self._model, "0", adapter, output.finish_reason).inc()


_Value = Callable[[EngineSnapshot], float]
_GAUGES: Sequence[tuple[str, str, _Value]] = (
    ("model_loaded", "Whether the model is loaded.", lambda one: float(one.is_loaded)),
    ("num_requests_running", "Samples that take part in passes.", lambda one: one.stats.num_running),
    ("num_requests_waiting", "Samples that wait for room in the engine.", lambda one: one.stats.num_waiting),
    ("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1.", lambda one: one.cache_usage),
)
_COUNTERS: Sequence[tuple[str, str, _Value]] = (
    ("model_loads", "How often the model was loaded.", lambda one: one.num_loads),
    ("prompt_tokens", "Prompt tokens of finished samples.", lambda one: one.stats.prompt_tokens),
    ("generation_tokens", "Output tokens of finished samples.", lambda one: one.stats.completion_tokens),
    ("prefix_cache_queries", "Prompt tokens that were looked for in the cache.", lambda one: one.stats.prompt_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the cache.", lambda one: one.stats.num_cached_tokens),
    ("num_preemptions", "Preemptions of requests.", lambda one: one.stats.num_preemptions),
    ("engine_steps", "Passes of the target.", lambda one: one.stats.num_steps),
    ("mixture_passes", "Extra passes that compute the weights of mixtures of adapters.", lambda one: one.stats.num_mixture_passes),
    ("request_failures", "Samples that failed by themselves.", lambda one: one.stats.num_failed),
    ("request_aborts", "Samples that were aborted.", lambda one: one.stats.num_aborted),
)
_DRAFTER_COUNTERS: Sequence[tuple[str, str, _Value]] = (
    ("spec_decode_num_drafts", "Steps with drafts.", lambda one: one.stats.speculation.steps - one.stats.speculation.plain_steps),
    ("spec_decode_num_draft_tokens", "Drafted tokens.", lambda one: one.stats.speculation.num_draft_tokens),
    ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", lambda one: one.stats.speculation.num_accepted_tokens),
    ("drafter_failures", "How often the drafter failed; the steps were plain.", lambda one: one.stats.drafter_failures),
)
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_LATENCY = "Between two steps that brought a sample tokens; a step may bring several."


class _EngineCollector(Collector):
    """The engines' counters; those of speculation include finished requests only."""

    def __init__(self) -> None:
        self.engines: Mapping[str, EngineSnapshot] = {}

    def collect(self) -> Iterable[Metric]:
        for name, text, value_of in _GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=_LABELS)
            for model, one in self.engines.items():
                gauge.add_metric([model, "0"], value_of(one))
            yield gauge
        for name, text, value_of in _COUNTERS:
            yield self._counter(name, text, (), partial(_one_value, value_of))
        yield self._inter_token_latency()
        for name, text, value_of in _DRAFTER_COUNTERS:
            yield self._counter(name, text, ("drafter",), partial(_of_drafter, value_of))
        yield self._counter(_PER_POSITION, "Accepted drafts by depth from 0.", ("drafter", "position"), _accepted_by_position)
        yield self._counter("plain_steps", "Steps without drafts, by reason.", ("reason",), _skips_by_reason)

    def _counter(
        self, name: str, text: str, labels: Sequence[str], values_of: Callable[[EngineSnapshot], Iterable[tuple[Sequence[str], float]]]
    ) -> Metric:
        """A counter of all models; `values_of` returns the further labels' values with the count of each."""
        family = CounterMetricFamily(PREFIX + name, text, labels=[*_LABELS, *labels])
        for model, one in self.engines.items():
            for own, value in values_of(one):
                family.add_metric([model, "0", *own], value)
        return family

    def _inter_token_latency(self) -> Metric:
        family = HistogramMetricFamily(PREFIX + "inter_token_latency_seconds", _LATENCY, labels=_LABELS)
        ends = [*map(floatToGoString, LATENCY_BUCKETS_S), "+Inf"]
        for model, one in self.engines.items():
            latency = one.stats.inter_token_latency
            family.add_metric([model, "0"], list(zip(ends, accumulate(latency.counts), strict=True)), latency.total_s)
        return family


def _one_value(value_of: _Value, one: EngineSnapshot) -> Iterable[tuple[Sequence[str], float]]:
    return [((), value_of(one))]


def _of_drafter(value_of: _Value, one: EngineSnapshot) -> Iterable[tuple[Sequence[str], float]]:
    return [((one.drafter,), value_of(one))]


def _accepted_by_position(one: EngineSnapshot) -> Iterable[tuple[Sequence[str], float]]:
    counts = one.stats.speculation.num_accepted_tokens_by_position or [0]
    return [((one.drafter, str(position)), count) for position, count in enumerate(counts)]


def _skips_by_reason(one: EngineSnapshot) -> Iterable[tuple[Sequence[str], float]]:
    return [((reason.value,), count) for reason, count in one.stats.speculation.skip_counts.items()]
