"""Our own engine as a worker: `python -m paceline.benchmarking.own_worker`, requests and replies as lines of JSON.

The first line opens the model: {"model", "mode", "threads", "context", "num_speculative_tokens", "drafters": [...], "options": {...}},
options being arguments of `paceline.LLM`. Every further one is a request, {"prompt_ids", "max_tokens", "temperature", "seed",
"prediction"}, or a batch of them, {"batch": [request, ...]}; end tokens are ignored. Each request starts with empty caches.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from paceline import __version__
from paceline.benchmarking.peers.worker_loop import memory_bytes, serve
from paceline.engine.inputs import RequestOptions
from paceline.engine.loader import LoadedEngine, load_engine, parse_settings
from paceline.engine.request import EngineRequest
from paceline.errors import PacelineError, RequestError
from paceline.models.layers import ExpertMLP
from paceline.runtimes.native.library import kernels, kernels_path
from paceline.runtimes.native.network import NativeNetwork
from paceline.sampling.params import SamplingParams


class TimedCall:
    """A function that sums the seconds spent in it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = self._call(*arguments)
        self.seconds += time.perf_counter() - start
        return result


class OwnModel:
    """A model in one mode, with a clock around its kernels.

    Args:
        command: the first line.

    Raises:
        PacelineError: it cannot be loaded.
    """

    def __init__(self, command: dict[str, Any]) -> None:
        self._inside: TimedCall | None = None
        if kernels_path() is not None:
            library: Any = kernels()
            self._inside = library.paceline_run = TimedCall(library.paceline_run)
        drafters = command["drafters"]
        options = {
            **command["options"],
            "drafter": list(drafters) if len(drafters) > 1 else drafters[0] if drafters else "none",
            "threads": command["threads"],
            "max_model_len": command["context"],
            "enable_prefix_caching": False,  # rows of earlier requests must not help later ones
        }
        if command["num_speculative_tokens"] is not None:
            options["num_speculative_tokens"] = command["num_speculative_tokens"]
        self._loaded: LoadedEngine = load_engine(*parse_settings(command["model"], options))

    def facts(self) -> dict[str, Any]:
        """Return the facts of the model for the report."""
        loaded = self._loaded
        runtime, cache = loaded.engine.runtime, loaded.engine.cache
        is_native = isinstance(runtime, NativeNetwork)
        library = kernels_path()
        facts: dict[str, Any] = {
            "name": "paceline",
            "version": __version__,
            "note": loaded.banner,
            "notices": list(loaded.notices),
            "drafter": loaded.drafter_name,
            "numerics": loaded.numerics,
            "library": library.name if is_native and library is not None else "torch",
            "weights_bytes": None,
            "cache_bytes_per_token": None,
        }
        config = runtime.config
        if isinstance(runtime, NativeNetwork) and not any(isinstance(layer.mlp, ExpertMLP) for layer in config.layers):
            unread = 0 if config.tied_embeddings else runtime.weights.tensor_info("embedding.weight").nbytes
            facts["weights_bytes"] = runtime.weights.nbytes - unread
            facts["cache_bytes_per_token"] = cache.bytes_per_token if config.sliding_window is None else None
        return facts

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run a request or a batch.

        Raises:
            PacelineError: it cannot be served.
        """
        items = command.get("batch") or [command]
        inside = 0.0 if self._inside is None else self._inside.seconds
        start = time.perf_counter()
        requests = [self._engine_request(item) for item in items]
        times: list[list[float]] = [[] for _ in requests]
        num_passes = self._run(requests, times, start)
        seconds = time.perf_counter() - start
        for request, item in zip(requests, items, strict=True):
            if request.num_output_tokens != item["max_tokens"]:
                raise RequestError(f"the output has {request.num_output_tokens} tokens, expected {item['max_tokens']}")
        answer = self._counts(requests, num_passes) | {"seconds": seconds}
        if self._inside is not None and isinstance(self._loaded.engine.runtime, NativeNetwork):
            answer["host_s"] = max(0.0, seconds - (self._inside.seconds - inside))
        outputs = [{"token_ids": list(request.output_token_ids), "times_s": own} for request, own in zip(requests, times, strict=True)]
        return answer | ({"outputs": outputs} if "batch" in command else outputs[0])

    def _engine_request(self, item: dict[str, Any]) -> EngineRequest:
        params = SamplingParams(max_tokens=item["max_tokens"], temperature=item["temperature"], seed=item["seed"], ignore_eos=True)
        options: RequestOptions = {}
        if item.get("prediction") and self._loaded.engine.speculator.uses_predicted_outputs:
            options["prediction"] = item["prediction"]
        (request,) = self._loaded.make_requests([list(item["prompt_ids"])], params, options, is_streamed=False)
        return request

    def _run(self, requests: Sequence[EngineRequest], times: Sequence[list[float]], start: float) -> tuple[int, int]:
        """Run the requests; return the number of passes, and of passes that began when every request had a token."""
        num_passes = num_decoding = 0
        with closing(self._loaded.engine.run(requests)) as steps:
            for _ in steps:
                now = time.perf_counter() - start
                num_passes += 1
                num_decoding += all(times)
                for request, own in zip(requests, times, strict=True):
                    own.extend([now] * (request.num_output_tokens - len(own)))
        return num_passes, num_decoding

    def _counts(self, requests: Sequence[EngineRequest], num_passes: tuple[int, int]) -> dict[str, Any]:
        stats = [request.stats for request in requests]
        resident, peak = memory_bytes()
        return {
            "num_draft_tokens": sum(one.num_draft_tokens for one in stats),
            "num_accepted_tokens": sum(one.num_accepted_tokens for one in stats),
            "steps": sum(one.steps for one in stats),
            "passes": num_passes[0],
            "decoding_passes": num_passes[1],
            "rss_bytes": resident,
            "peak_rss_bytes": peak,
        }


if __name__ == "__main__":
    serve(OwnModel, PacelineError)
