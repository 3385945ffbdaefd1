"""From settings to an engine that can run: target, cache, drafter and how much to draft."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import EngineConfig, SpeculationConfig, cache_directory, quant_options
from paceline.drafters import TargetDescription, make_drafter
from paceline.engine.batch import RequestMaker
from paceline.engine.engine import Engine
from paceline.engine.memory import plan_cache
from paceline.hub import resolve
from paceline.kv_cache.paged import KVCache
from paceline.models.config import WeightType
from paceline.runtimes.base import Numerics, Runtime
from paceline.runtimes.cost import time_passes
from paceline.runtimes.load import RuntimeOptions, load_runtime
from paceline.speculation.draft_length import DraftLengthPolicy, StepCosts
from paceline.speculation.drafter import Drafter
from paceline.speculation.guess import Guesser
from paceline.tokenizer import Tokenizer

DEFAULT_DRAFT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine, how requests for it are made, one-line notices its user should see, and the settings it was opened with."""

    engine: Engine
    maker: RequestMaker
    notices: tuple[str, ...]
    config: EngineConfig


def open_engine(config: EngineConfig, speculation: SpeculationConfig, drafter: Drafter | None = None) -> OpenedEngine:
    """Load what the settings name.

    Args:
        drafter: one made by the caller; `speculation.drafter` is then only a name.

    Raises:
        CheckpointError, CapacityError, IncompatibleDrafterError, BackendUnavailableError, ConfigError: with the way out.
    """
    directory = resolve(config.model, gguf_file=config.gguf_file, revision=config.revision, token=config.token, offline=config.offline)
    tokenizer = Tokenizer.open(directory)
    loaded = load_runtime(directory, _runtime_options(config, drafter))
    runtime = loaded.runtime
    plan = plan_cache(runtime.config, config, runtime.capabilities.weight_type)
    cache = runtime.new_cache(plan.num_blocks)
    vocab_size = min(runtime.config.vocab_size, tokenizer.vocab_size)
    if drafter is None:
        target = TargetDescription(
            directory=directory,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_context=plan.max_context,
            max_slots=cache.max_slots,
            num_threads=config.num_threads,
            device=config.device,
            tree_width=speculation.tree_width,
            offline=config.offline,
            token=config.token,
            draft_quant=quant_options("draft_quant", speculation.draft_quant),
            quant_directory=cache_directory(),
        )
        drafter = make_drafter(speculation.drafter, target)
    policy = DraftLengthPolicy(DEFAULT_DRAFT_TOKENS) if drafter is None else _policy(speculation, runtime, cache, plan.max_context)
    guesser = Guesser(drafter, policy, vocab_size=vocab_size, layout=cache.layout)
    engine = Engine(runtime, cache, guesser, max_num_seqs=config.max_num_seqs, chunk_rows=config.chunk_rows)
    ends = tuple(dict.fromkeys((*runtime.config.eos_token_ids, *tokenizer.end_token_ids)))
    maker = RequestMaker(tokenizer, vocab_size, plan.max_context, ends)
    return OpenedEngine(engine, maker, _notices((*tokenizer.notices, *loaded.notices), plan.notice), config)


def _runtime_options(config: EngineConfig, drafter: Drafter | None) -> RuntimeOptions:
    return RuntimeOptions(
        numerics=Numerics(config.numerics),
        dtype=None if config.dtype == "auto" else WeightType(config.dtype),
        num_threads=config.num_threads,
        max_context=config.max_context,
        device=config.device,
        backend=config.backend,
        collect_layers=drafter.needs.layers if drafter is not None else (),
        facts_directory=cache_directory(),
        quant=quant_options("quant", config.quant),
        quant_directory=cache_directory(),
        regroup=config.gguf_weights == "regroup",
    )


def _policy(speculation: SpeculationConfig, runtime: Runtime, cache: KVCache, max_context: int) -> DraftLengthPolicy:
    """A fixed draft length; the guard's costs are timed here, on the machine that will run."""
    wanted = speculation.num_draft_tokens
    count = wanted if isinstance(wanted, int) else DEFAULT_DRAFT_TOKENS
    row_budget = 1 + count * speculation.tree_width
    times = time_passes(runtime, cache, (1, row_budget), max_context=max_context)
    runtime.num_passes = 0
    return DraftLengthPolicy(count, row_budget=row_budget, costs=StepCosts(times[1], times[row_budget]))


def _notices(loaded: Sequence[str], cache_notice: str | None) -> tuple[str, ...]:
    return (*loaded, cache_notice) if cache_notice else tuple(loaded)
