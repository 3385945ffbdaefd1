"""Metrics in Prometheus's text form. Names after the prefix, and labels, are vLLM's; `drafter` is our own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The counters of a model's engine. Those of a model that was unloaded stay until it is loaded again and counts from 0.

    Attributes:
        cache_usage: share of the cache's blocks in use, 0 to 1.
        num_loads: how often the model was loaded.
    """

    stats: EngineStats = field(default_factory=EngineStats)
    drafter: str = "none"
    cache_usage: float = 0.0
    is_loaded: bool = False
    num_loads: int = 0

    @classmethod
    async def of(cls, engine: AsyncEngine, num_loads: int) -> "EngineSnapshot":
        stats, pool = await engine.stats(), engine.loaded.engine.cache.pool
        return cls(stats, engine.loaded.drafter_name, 1.0 - pool.num_free / pool.num_blocks, is_loaded=True, num_loads=num_loads)

    def unloaded(self) -> "EngineSnapshot":
        """Return the counters as they are after the engine was closed: nothing runs or waits."""
        return replace(self, stats=replace(self.stats, num_running=0, num_waiting=0), cache_usage=0.0, is_loaded=False)


class Metrics(Collector):
    """Records histograms of the finished requests of a model, and renders them with its engine's counters for Prometheus.

    Args:
        model: its name, the label `model_name`.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model, self._labels = model, {"model_name": model, "engine": "0"}
        self._snapshot = EngineSnapshot()
        self._registry.register(self)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(PREFIX + name, text, ["model_name", "engine"], buckets=tuple(buckets), registry=self._registry)
            return made.labels(model, "0")

        self._first_token = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS)
        self._between = histogram("request_time_per_output_token_seconds", "Mean time between two tokens of a request.", LATENCY_BUCKETS_S)
        self._whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "From a request's arrival to its first pass.", _SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "From a sample's first pass to its first token.", _SECONDS)
        self._decode = histogram("request_decode_time_seconds", "From a sample's first token to its last.", _SECONDS)
        self._inference = histogram("request_inference_time_seconds", "From a sample's first pass to its last token.", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a sample.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Output tokens of a sample.", _TOKENS)
        labels = ["model_name", "engine", "finished_reason"]
        self._finished = Counter(PREFIX + "request_success", "Samples that were finished.", labels, registry=self._registry)
        for reason in ("stop", "length"):
            self._finished.labels(model, "0", reason)
        labels = ["model_name", "engine", "adapter", "finished_reason"]
        self._adapters = Counter(PREFIX + "adapter_requests", "Samples that an adapter finished.", labels, registry=self._registry)
        labels = ["model_name", "engine", "route", "status"]
        self._answers = Counter(PREFIX + "http_requests", "HTTP responses.", labels, registry=self._registry)

    def count_response(self, route: str | None, status: int | None, model: str) -> None:
        """Count a response for any model; no route: none matched, or the middleware refused the request."""
        self._answers.labels(model, "0", route or "none", str(status or 0)).inc()

    def observe(self, output: RequestOutput, elapsed_s: float, adapter: str | None = None) -> None:
        """Count a finished sample of a request that arrived `elapsed_s` ago and names `adapter`."""
        self._whole.observe(elapsed_s)
        self._first_token.observe(max(0.0, elapsed_s - output.timing.decode_s))
        self._queue.observe(max(0.0, elapsed_s - output.timing.total_s))
        self._prefill.observe(output.timing.prompt_s)
        self._decode.observe(output.timing.decode_s)
        self._inference.observe(output.timing.total_s)
        self._prompt.observe(output.usage.prompt_tokens)
        self._generated.observe(len(output.token_ids))
        if len(output.token_ids) > 1:
            self._between.observe(output.timing.decode_s / (len(output.token_ids) - 1))
        self._finished.labels(self._model, "0", output.finish_reason).inc()
        if adapter is not None:
            self._adapters.labels(self._model, "0", adapter, output.finish_reason).inc()

    def text(self, snapshot: EngineSnapshot) -> str:
        self._snapshot = snapshot
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterable[Metric]:
        """Yield the engine's counters; those of speculation include finished requests only."""
        stats, speculation, name = self._snapshot.stats, self._snapshot.stats.speculation, self._snapshot.drafter
        yield self._gauge("model_loaded", "Whether the model is loaded.", float(self._snapshot.is_loaded))
        yield self._counter("model_loads", "How often the model was loaded.", self._snapshot.num_loads)
        yield self._gauge("num_requests_running", "Samples that take part in passes.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Samples that wait for room in the engine.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1.", self._snapshot.cache_usage)
        yield self._counter("prompt_tokens", "Prompt tokens of finished samples.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Output tokens of finished samples.", stats.completion_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens that were looked for in the cache.", stats.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.num_cached_tokens)
        yield self._counter("num_preemptions", "Preemptions of requests.", stats.num_preemptions)
        yield self._counter("engine_steps", "Passes of the target.", stats.num_steps)
        yield self._counter("mixture_passes", "Extra passes that compute the weights of mixtures of adapters.", stats.num_mixture_passes)
        yield self._counter("request_failures", "Samples that failed by themselves.", stats.num_failed)
        yield self._counter("request_aborts", "Samples that were aborted.", stats.num_aborted)
        yield self._inter_token_latency()
        drafter = {"drafter": name}
        drafts = speculation.steps - speculation.plain_steps
        yield self._counter("spec_decode_num_drafts", "Steps with drafts.", drafts, drafter)
        yield self._counter("spec_decode_num_draft_tokens", "Drafted tokens.", speculation.num_draft_tokens, drafter)
        yield self._counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.", speculation.num_accepted_tokens, drafter)
        yield self._counter("drafter_failures", "How often the drafter failed; the steps were plain.", stats.drafter_failures, drafter)
        accepted = [((name, str(depth)), count) for depth, count in enumerate(speculation.num_accepted_tokens_by_position or [0])]
        text = "Accepted drafts by depth from 0."
        yield self._counters("spec_decode_num_accepted_tokens_per_pos", text, ("drafter", "position"), accepted)
        reasons = [((reason.value,), count) for reason, count in speculation.skip_counts.items()]
        yield self._counters("plain_steps", "Steps without drafts, by reason.", ("reason",), reasons)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float, more: Mapping[str, str] | None = None) -> Metric:
        labels = more or {}
        return self._counters(name, text, tuple(labels), [(tuple(labels.values()), value)])

    def _counters(self, name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self._labels, *labels])
        for own, value in values:
            family.add_metric([*self._labels.values(), *own], value)
        return family

    def _inter_token_latency(self) -> Metric:
        latency = self._snapshot.stats.inter_token_latency
        text = "Between two steps that brought a sample tokens; a step may bring several."
        family = HistogramMetricFamily(PREFIX + "inter_token_latency_seconds", text, labels=list(self._labels))
        ends = [*map(floatToGoString, LATENCY_BUCKETS_S), "+Inf"]
        family.add_metric(list(self._labels.values()), list(zip(ends, accumulate(latency.counts), strict=True)), latency.total_s)
        return family


def merged_pages(pages: Iterable[str]) -> str:
    """Merge pages of metrics: each family has its comments once."""
    families: dict[str, list[str]] = {}
    for page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                families.setdefault(family, [])
            if line and not (line.startswith("#") and line in families[family]):
                families[family].append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
