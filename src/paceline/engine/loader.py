"""Loads an engine from settings: the target, its cache, the drafters, the draft length policy and the input processor."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig, SpeculationConfig, cache_directory, quant_options
from paceline.drafters import LoadedTarget, prepare_drafters
from paceline.engine.engine import Engine
from paceline.engine.input_processor import InputProcessor
from paceline.engine.inputs import Params, RequestOptions, params_per_prompt
from paceline.engine.memory import CachePlan, plan_cache
from paceline.engine.request import EngineRequest
from paceline.engine.scheduler import SchedulerLimits
from paceline.errors import CheckpointError, ConfigError, convert_memory_errors, printable
from paceline.hub import resolve_model
from paceline.kv_cache.cache import KVCache
from paceline.kv_cache.sliding_window import PassLimits
from paceline.machine import available_memory_bytes
from paceline.models.adapters.read import check_adapter_name
from paceline.models.adapters.xlora import is_xlora, read_any_adapter
from paceline.models.checkpoint import read_model_config
from paceline.models.config import WeightType
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.outputs import RequestOutput, StreamChunk
from paceline.runtimes.base import Network, Numerics
from paceline.runtimes.cost import PROFILED_CONTEXT_LEN, PROFILED_ROW_COUNTS, profile_forward
from paceline.runtimes.load import RuntimeOptions, load_network
from paceline.runtimes.profile_cache import ProfileCache
from paceline.sampling.defaults import SamplingDefaults
from paceline.sampling.params import SAMPLING_PARAM_NAMES
from paceline.speculation.draft_length.policy import AdaptiveDraftLength, FixedDraftLength
from paceline.speculation.drafter import Drafter, check_drafter
from paceline.speculation.rejection import Acceptance
from paceline.speculation.speculator import Speculator
from paceline.spelling import unknown_argument
from paceline.tokenizer.tokenizer import Tokenizer

DEFAULT_DRAFT_TOKENS = 16  # maximum draft tokens per step, unless the user sets a limit; the policy chooses the number
_DRAFTER_OF_VLLM_METHOD = {"ngram": "ngram", "[ngram]": "ngram", "suffix": "suffix", "medusa": "medusa", "mtp": "mtp"}
"""Drafter names for vLLM's methods that need no separate model."""
_VLLM_METHODS_WITH_MODEL = ("draft_model", "medusa", "mtp", "eagle", "eagle3", "dflash", "dspark", "p_eagle", "pard")
_SPECULATIVE_CONFIG_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with its input processor and settings.

    Attributes:
        notices: messages to the user about the model and the drafters, one line each.
        cache_banner: one line about the maximum size of the cache.
    """

    engine: Engine
    input_processor: InputProcessor
    notices: tuple[str, ...]
    config: EngineConfig
    cache_banner: str

    @property
    def numerics(self) -> str:
        """The numerics that the runtime uses: "exact" or "fast"."""
        return self.engine.runtime.capabilities.numerics.value

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The sampling parameters that the model's files recommend."""
        return SamplingDefaults.from_recommended(self.engine.runtime.config.sampling_defaults)

    @property
    def drafter_name(self) -> str:
        return "+".join(self.engine.speculator.drafter_names) or "none"

    @property
    def banner(self) -> str:
        """One line on the drafters and the draft length policy."""
        drafters, policy = self.engine.speculator.drafters, self.engine.speculator.policy
        if not drafters:
            return "speculation: off"
        described = " + ".join(drafter.traits.description or drafter.name for drafter in drafters)
        return f"speculation: on, drafter {described}, {policy.describe()}"

    def make_requests(
        self, prompts: Sequence[list[int]], params: Params, options: RequestOptions, *, is_streamed: bool
    ) -> list[EngineRequest]:
        """Create the requests of all samples of all prompts, in order. The caller adds them to the engine.

        Raises:
            RequestError: an option or a sampling parameter is invalid.
        """
        has_prediction_drafter = self.engine.speculator.uses_predicted_outputs
        all_options = self.input_processor.check_options(options, len(prompts), has_prediction_drafter=has_prediction_drafter)
        for prompt_options in all_options:
            self.engine.adapters.check_loaded(prompt_options.adapter)
        return [
            sample
            for prompt, own_params, own_options in zip(prompts, params_per_prompt(params, len(prompts)), all_options, strict=True)
            for sample in self.input_processor.make_samples(prompt, own_params, own_options, is_streamed=is_streamed)
        ]

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load an adapter from a directory. Requests select it by its name.

        Raises:
            CapacityError, CheckpointError, ConfigError, BackendUnavailableError: as for `LLM.load_adapter`.
        """
        check_adapter_name(name)
        unchecked_directory: object = directory
        if not isinstance(unchecked_directory, str | os.PathLike) or not os.fspath(unchecked_directory):
            raise ConfigError(f"the adapter's directory is {unchecked_directory!r}: give its path, such as 'adapters/sql'")
        self.engine.adapters.check_name_unused(name)
        runtime = self.engine.runtime
        with convert_memory_errors(f"the adapter {name!r}", "use an adapter of a lower rank, remove others, or close programs"):
            path, free = Path(os.fsdecode(directory)), available_memory_bytes()
            adapter = read_any_adapter(path, name=name, config=runtime.config, weights=runtime.weights, memory_bytes=free)
            self.engine.add_adapter(adapter)

    def make_chunk(self, request: EngineRequest, num_sent: int) -> StreamChunk:
        """Return a chunk of the output tokens after the first `num_sent`. If the request has ended, the chunk has the whole output, too."""
        return self.input_processor.make_chunk(request, num_sent, self.make_output(request) if request.is_finished else None)

    def make_output(self, request: EngineRequest) -> RequestOutput:
        drafter = request.drafter or self.drafter_name if request.is_speculative else "none"
        return self.input_processor.make_output(request, numerics=self.numerics, drafter=drafter)


def parse_settings(model: str, options: dict[str, Any]) -> tuple[EngineConfig, SpeculationConfig, Sequence[Drafter]]:
    """Convert the arguments of `LLM` to engine settings, speculation settings, and the `Drafter` objects passed as `drafter`.

    Raises:
        ConfigError: an argument is unknown or its value is invalid.
    """
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model is {model!r}: give 'mini', a directory, a GGUF file, or a Hugging Face id such as 'owner/name'")
    options = _convert_speculative_config(options)
    drafter = options.get("drafter", "auto")
    drafters = _check_drafters(drafter)
    if drafters:
        _check_no_drafter_options(options)
    names = tuple(one.name for one in drafters) if drafters else tuple(drafter) if isinstance(drafter, list) else drafter
    settings = {**options, "model": os.fsdecode(model), "drafter": names}
    settings["drafter_options"], adapters = options.get("drafter_options") or {}, options.get("adapters") or {}
    settings["adapters"] = {name: _path_as_text(path) for name, path in adapters.items()} if isinstance(adapters, Mapping) else adapters
    settings |= {name: _path_as_text(options.get(name)) for name in ("merge_adapter", "draft_adapter")}
    engine_names, speculation_names = ({one.name for one in fields(config_class)} for config_class in (EngineConfig, SpeculationConfig))
    for name in settings.keys() - engine_names - speculation_names:
        raise ConfigError(unknown_argument(name, "LLM", engine_names | speculation_names, sampling_names=SAMPLING_PARAM_NAMES))
    engine = EngineConfig(**{name: value for name, value in settings.items() if name in engine_names})
    return engine, SpeculationConfig(**{name: value for name, value in settings.items() if name in speculation_names}), drafters


def _convert_speculative_config(options: dict[str, Any]) -> dict[str, Any]:
    """Replace vLLM's `speculative_config` among the options by our settings `drafter` and `num_speculative_tokens`.

    Keys whose value is None are ignored, and so are `prompt_lookup_max` and `prompt_lookup_min`: our n-gram drafter tries all lengths.

    Raises:
        ConfigError: `speculative_config` is no dictionary or has an unknown key or method, or our settings are also given.
    """
    config, others = options.get("speculative_config"), {name: value for name, value in options.items() if name != "speculative_config"}
    if config is None:
        return others
    if not isinstance(config, Mapping):
        raise ConfigError(f'speculative_config is {config!r}: give a dictionary such as {{"method": "ngram", "num_speculative_tokens": 4}}')
    values = {name: value for name, value in config.items() if value is not None}
    if unknown := [name for name in values if name not in _SPECULATIVE_CONFIG_KEYS]:
        raise ConfigError(f"speculative_config: unknown key {unknown[0]!r}: use {', '.join(_SPECULATIVE_CONFIG_KEYS)}, or our drafter=...")
    settings: dict[str, Any] = {"drafter": _drafter_for_vllm_method(values.get("method"), values.get("model"))}
    if "num_speculative_tokens" in values:
        settings["num_speculative_tokens"] = values["num_speculative_tokens"]
    if repeated := [name for name in ("drafter", "num_speculative_tokens") if others.get(name, "auto") != "auto"]:
        raise ConfigError(f"speculative_config and {repeated[0]} are both given: give one of them")
    return others | settings


def _drafter_for_vllm_method(method: object, model: object) -> str:
    if isinstance(model, str) and model in ("ngram", "[ngram]") and method is None:
        return "ngram"
    name = "mtp" if isinstance(method, str) and method.endswith("_mtp") else method
    if name in ("ngram", "[ngram]", "suffix") or (model is None and name in _DRAFTER_OF_VLLM_METHOD):
        return _DRAFTER_OF_VLLM_METHOD[str(name)]
    if name is not None and name not in _VLLM_METHODS_WITH_MODEL:
        known = ", ".join(dict.fromkeys((*_DRAFTER_OF_VLLM_METHOD, *_VLLM_METHODS_WITH_MODEL)))
        raise ConfigError(f"speculative_config: unknown method {method!r}: use one of {known}")
    if not isinstance(model, str) or not model:
        raise ConfigError("speculative_config needs a model: give the directory or id of a draft model or of heads, or the method 'ngram'")
    return model


def _path_as_text(path: Any) -> Any:
    return os.fsdecode(path) if isinstance(path, os.PathLike) else path


def _check_drafters(drafter: object) -> list[Drafter]:
    """Return the `Drafter` objects in the setting `drafter`; empty if it has names only. Raise a ConfigError for invalid objects."""
    items = list(drafter) if isinstance(drafter, list | tuple) else [drafter]
    drafters = [item for item in items if isinstance(item, Drafter)]
    if drafters and (names := [item for item in items if not isinstance(item, Drafter)]):
        raise ConfigError(f"drafter contains {type(drafters[0]).__name__} and {names[0]!r}: give names only, or Drafter objects only")
    for index, item in enumerate(drafters):
        check_drafter(item)
        if item.name in [other.name for other in drafters[:index]]:
            raise ConfigError(f"two drafters are named {item.name!r}: give them different names, because requests select a drafter by name")
    return drafters


def _check_no_drafter_options(options: Mapping[str, Any]) -> None:
    """Raise a ConfigError if settings of drafters are given, because they would have no effect on drafter objects."""
    if given := options.get("drafter_options"):
        raise ConfigError(f"drafter_options {given!r} have no effect on a Drafter object: pass them to its constructor")
    if (adapter := options.get("draft_adapter")) is not None:
        raise ConfigError(f"draft_adapter {adapter!r} has no effect on a Drafter object: merge the adapter into the draft model")


def load_engine(
    config: EngineConfig, speculation: SpeculationConfig, drafters: Sequence[Drafter] = (), *, with_xlora: bool = False
) -> LoadedEngine:
    """Load the model, the drafters and the adapters that the settings name.

    Args:
        drafters: drafter objects that the caller made; if there are any, `speculation.drafter` is ignored.
        with_xlora: reserve memory for X-LoRA adapters even if the settings name none.

    Raises:
        CheckpointError, CapacityError, IncompatibleDrafterError, BackendUnavailableError, ConfigError: see `LLM`.
    """
    directory = resolve_model(
        config.model, gguf_file=config.gguf_file, revision=config.revision, token=config.hf_token, offline=config.offline
    )
    tokenizer = _open_tokenizer(directory)
    prepared = prepare_drafters(directory, config, speculation, drafters)
    loaded = load_network(directory, _runtime_options(config, prepared.layer_boundaries))
    runtime = loaded.network
    plan, cache = _make_cache(runtime, config, with_xlora=with_xlora or any(map(is_xlora, map(Path, config.adapters.values()))))
    vocab_size = min(runtime.config.vocab_size, tokenizer.vocab_size)
    target = LoadedTarget(
        directory=directory,
        runtime=runtime,
        cache=cache,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_model_len=plan.max_model_len,
        weight_bits=loaded.weight_bits,
        memory_bytes=available_memory_bytes() if config.device != "cuda" else None,
        engine=config,
        speculation=speculation,
    )
    drafters = prepared.open(target)
    policy = _make_policy(speculation, runtime, cache, plan.max_model_len) if drafters else FixedDraftLength(DEFAULT_DRAFT_TOKENS)
    speculator = Speculator(drafters, policy, vocab_size=vocab_size, acceptance=Acceptance(speculation.acceptance))
    engine = Engine(runtime, cache, speculator, _scheduler_limits(config, plan))
    eos_ids = tuple(dict.fromkeys((*runtime.config.eos_token_ids, *tokenizer.end_token_ids)))
    suppressed = [token_id for token_id in runtime.config.suppressed_token_ids if token_id < vocab_size]
    inputs = InputProcessor(
        tokenizer, vocab_size, plan.max_model_len, eos_ids, plan.too_long_advice, suppressed, config.num_threads, plan.num_cache_tokens
    )
    notices = [*config.notices, *tokenizer.notices, *loaded.notices, *prepared.notices]
    if loaded.bundled_head is not None and loaded.bundled_head not in [drafter.name for drafter in drafters]:
        notices.append(f"{directory} also contains a drafting head: use drafter={loaded.bundled_head!r}")
    notices += [*(notice for drafter in drafters for notice in drafter.traits.notices), *([plan.notice] if plan.notice else [])]
    loaded_engine = LoadedEngine(engine, inputs, tuple(map(printable, notices)), config, plan.describe())
    for name, adapter in config.adapters.items():
        loaded_engine.load_adapter(name, adapter)
    return loaded_engine


def _open_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer. If the architecture is not supported either, raise that error: another tokenizer would not help.

    Raises:
        CheckpointError: the architecture is not supported, or the tokenizer cannot be read.
    """
    try:
        return Tokenizer.open(directory)
    except CheckpointError:
        read_model_config(directory)
        raise


def _scheduler_limits(config: EngineConfig, plan: CachePlan) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=min(config.max_num_seqs, plan.max_num_seqs),
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk_size=config.prefill_chunk_size,
    )


def _make_cache(runtime: Network, config: EngineConfig, *, with_xlora: bool) -> tuple[CachePlan, KVCache]:
    """Allocate the target's cache. X-LoRA adapters need a second set of keys and values, for the passes that compute their scalings."""
    limits = None
    if runtime.has_window_eviction:  # sliding-window layers have room for the largest pass: a step, or one that `profile_forward` times
        limits = PassLimits(config.max_num_seqs, max(config.max_num_batched_tokens, PROFILED_CONTEXT_LEN + max(PROFILED_ROW_COUNTS)))
    plan = plan_cache(runtime.config, config, runtime.capabilities.kv_cache_dtype, limits, 2 if with_xlora else 1)
    cache = runtime.new_cache(plan.num_blocks, limits, plan.checkpoints)
    if with_xlora:
        runtime.enable_xlora(cache)
    cache.prefix_caching = config.enable_prefix_caching
    return plan, cache


def _runtime_options(config: EngineConfig, collect_layers: Sequence[int]) -> RuntimeOptions:
    return RuntimeOptions(
        numerics=Numerics(config.numerics),
        dtype=None if config.dtype == "auto" else WeightType(config.dtype),
        kv_cache_dtype=None if config.kv_cache_dtype == "auto" else KVCacheDtype(config.kv_cache_dtype),
        num_threads=config.num_threads,
        max_model_len=config.max_model_len,
        device=config.device,
        backend=config.backend,
        collect_layers=collect_layers,
        quantization=quant_options("quantization", config.quantization),
        cache_directory=cache_directory(),
        regroup=config.gguf_weights == "regroup",
        memory_bytes=available_memory_bytes() if config.device != "cuda" else None,
        merge_adapter=None if config.merge_adapter is None else Path(config.merge_adapter),
    )


def _make_policy(speculation: SpeculationConfig, runtime: Network, cache: KVCache, max_model_len: int) -> FixedDraftLength:
    """Return the draft length policy, which uses measured times of the target's forward passes on this machine."""
    limit = speculation.num_speculative_tokens
    count = limit if isinstance(limit, int) else DEFAULT_DRAFT_TOKENS
    profile = profile_forward(runtime, cache, ProfileCache(cache_directory()), max_model_len=max_model_len)
    return AdaptiveDraftLength(count, profile, max_rows=1 + count * speculation.tree_width)
