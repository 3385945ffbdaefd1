"""Check a target and its drafters from their files, without loading weights: pairing, memory, numerics, drafters to try."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config import (
    EngineConfig,
    QuantOptions,
    SpeculationConfig,
    cache_directory,
    draft_quant_options,
    lm_head_copy_options,
    quant_options,
    weights_cache_bytes,
)
from paceline.drafters import HeadOptions, check_draft_adapter, prepare_drafter
from paceline.errors import PacelineError, convert_memory_errors
from paceline.hub import resolve_model
from paceline.machine import available_memory_bytes
from paceline.models.adapters.adapter import Adapter
from paceline.models.adapters.read import read_adapter
from paceline.models.adapters.xlora import read_any_adapter
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.quantize import mean_weight_bits
from paceline.models.storage.quantized_cache import CACHE_FOLDER, cached_bytes
from paceline.prompt_file import PromptLine
from paceline.proof.checkpoint_facts import CheckpointFacts, read_checkpoint_facts
from paceline.proof.measured_speedup import PromptError
from paceline.proof.memory_estimate import MemoryEstimate, ModelMemory, estimate_memory
from paceline.proof.pairing import HeadFacts, PairCheck, check_draft_model, check_head
from paceline.proof.probe import ProbeResult, probe, search_layout
from paceline.proof.suggested_drafters import SuggestedDrafter, model_names, pass_costs, suggest_drafters
from paceline.runtimes.load import RuntimeOptions, merge_adapter, merged_adapter_name

_GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of `diagnose`.

    Attributes:
        engine, speculation: the target and its drafters, as `paceline run` takes them; device auto is judged as cpu.
        memory_bytes: memory to assume; None = what this machine has free.
        probe_arguments: arguments of `paceline.LLM` to load it with and time passes; None = load nothing.
        probe_prompts: the user's prompts, for the speedup; without them it is measured on sample texts.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    memory_bytes: int | None = None
    probe_arguments: dict[str, Any] | None = None
    probe_prompts: Sequence[PromptLine] = ()

    @property
    def drafters(self) -> tuple[str, ...]:
        drafter = self.speculation.drafter
        return (drafter,) if isinstance(drafter, str) else drafter

    @property
    def quantization(self) -> QuantOptions | None:
        """How the target is quantised while it is loaded; None = not at all."""
        return quant_options("quantization", self.engine.quantization)


@dataclass(frozen=True, slots=True)
class AdapterDiagnosis:
    """An adapter that fits: how many products, biases and whole matrices it changes, and its bytes in memory.

    Attributes:
        largest_rank: of X-LoRA, that of all its adapters together.
        num_mixed: adapters of X-LoRA; 0 = it is a plain one.
    """

    name: str
    num_products: int
    num_biases: int
    num_saved: int
    largest_rank: int
    nbytes: int
    num_mixed: int = 0

    @classmethod
    def of(cls, adapter: Adapter) -> "AdapterDiagnosis":
        arrays = [array for one in adapter.low_rank_updates.values() for array in (one.lora_a, one.lora_b)]
        arrays += [*adapter.biases.values(), *adapter.replacements.values()]
        mixture = adapter.mixture
        arrays += [] if mixture is None else [array for layer in mixture.classifier for array in layer]
        largest = max((len(one.lora_a) for one in adapter.low_rank_updates.values()), default=0)
        counts = len(adapter.low_rank_updates), len(adapter.biases), len(adapter.replacements)
        num_mixed = 0 if mixture is None else mixture.num_adapters
        return cls(adapter.name, *counts, largest, sum(array.nbytes for array in arrays), num_mixed)


@dataclass(slots=True)
class DrafterDiagnosis:
    """One drafter: its name, and for a draft model or a head its facts, the adapter it computes with and the verdict on the pair."""

    name: str
    facts: CheckpointFacts | None = None
    head: HeadFacts | None = None
    pair: PairCheck | None = None
    adapter: AdapterDiagnosis | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": None if self.facts is None else self.facts.as_dict(),
            "head": None if self.head is None else self.head.as_dict(),
            "pair": None if self.pair is None else self.pair.as_dict(),
            "adapter": None if self.adapter is None else asdict(self.adapter),
        }


@dataclass(slots=True)
class Diagnosis:
    """Everything that was found; `problems` are reasons why it cannot work, `notes` are not."""

    model: str
    target: CheckpointFacts | None = None
    drafters: list[DrafterDiagnosis] = field(default_factory=list)
    adapters: list[AdapterDiagnosis] = field(default_factory=list)
    merged: AdapterDiagnosis | None = None
    memory: MemoryEstimate | None = None
    numerics: str | None = None
    numerics_reason: str = ""
    probe: ProbeResult | None = None
    suggested: list[SuggestedDrafter] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def works(self) -> bool:
        """Whether nothing was found that keeps it from working."""
        return not self.problems

    @contextmanager
    def collected_problems(self) -> Iterator[None]:
        """Make a problem of an error of the block, but of a wrong prompt, which does not mean that the model cannot work."""
        try:
            yield
        except PromptError:
            raise
        except PacelineError as error:
            self.problems.append(str(error))

    def as_dict(self) -> dict[str, Any]:
        return {
            "works": self.works,
            "model": self.model,
            "target": None if self.target is None else self.target.as_dict(),
            "drafters": [drafter.as_dict() for drafter in self.drafters],
            "adapters": [asdict(adapter) for adapter in self.adapters],
            "merged_adapter": None if self.merged is None else asdict(self.merged),
            "memory": None if self.memory is None else self.memory.as_dict(),
            "numerics": self.numerics,
            "numerics_reason": self.numerics_reason,
            "probe": None if self.probe is None else self.probe.as_dict(),
            "suggested_drafters": [asdict(drafter) for drafter in self.suggested],
            "problems": self.problems,
            "notes": self.notes,
        }


def diagnose(options: DoctorOptions) -> Diagnosis:
    """Check the files; what cannot work becomes a problem in the result. Nothing is downloaded.

    Raises:
        PromptError: the model does not take one of the prompts.
    """
    found = Diagnosis(options.engine.model)
    with found.collected_problems():
        path = resolve_model(options.engine.model, gguf_file=options.engine.gguf_file, offline=True)
        found.target = read_checkpoint_facts(path, options.engine.max_model_len)
        if options.engine.merge_adapter is not None:
            found.target, found.merged = with_merged(found.target, options.engine.merge_adapter, options.quantization)
    if not found.works or found.target is None:
        suggested = suggest_drafters(model_names(options.engine.model, None))
        found.suggested = suggested if any(one.location != "built_in" for one in suggested) else []
        return found
    limit, max_model_len = found.target.config.max_positions, options.engine.max_model_len
    if max_model_len is not None and max_model_len > limit:
        found.problems.append(f"max_model_len is {max_model_len}, the model's limit is {limit}: lower max_model_len")
    try:
        head_options = HeadOptions.parse(options.speculation.drafter_options)
    except PacelineError as error:
        found.problems.append(str(error))
        return found
    _examine_drafters(found, found.target, options, head_options)
    for name, directory in options.engine.adapters.items():
        with found.collected_problems():
            found.adapters.append(AdapterDiagnosis.of(_read_adapter(name, Path(directory), found.target, read_any_adapter)))
    with found.collected_problems():  # nothing that is installed may be able to run it
        _estimate(found, found.target, options)
    if options.probe_arguments is not None and found.works:
        with found.collected_problems():
            found.probe = probe(options.probe_prompts, **options.probe_arguments)
            found.notes += _layout_notes(found.drafters, options.drafters, options.probe_arguments)
    costs = None if found.probe is None else pass_costs(found.target, options.quantization, found.probe.pass_s)
    names = model_names(options.engine.model, found.target.path)
    found.suggested = suggest_drafters(names, costs, quantization=_draft_quant(found.target, options))
    return found


def _examine_drafters(found: Diagnosis, target: CheckpointFacts, options: DoctorOptions, head_options: HeadOptions) -> None:
    for name in options.drafters:
        found.drafters.append(examine_drafter(name, target, options, head_options, found.problems, found.notes))
    for name in dict.fromkeys(name for name in options.drafters if options.drafters.count(name) > 1):
        found.problems.append(f"drafter {name!r} was given more than once: name each drafter once")
    if found.works:
        with found.collected_problems():
            head_options.check_all_used_by(drafter.name for drafter in found.drafters)
            check_draft_adapter(options.speculation.draft_adapter, [drafter.name for drafter in found.drafters])


def _layout_notes(drafters: Sequence[DrafterDiagnosis], names: Sequence[str], arguments: Mapping[str, Any]) -> list[str]:
    """Search better values of the options that heads leave open; return a line for each head that has some.

    Args:
        names: of the drafters, as `paceline run` takes them.
    """
    notes = []
    for drafter, name in zip(drafters, names, strict=True):
        if drafter.head is not None and drafter.head.ambiguous_options:
            alone = {**arguments, "drafter": drafter.name if name == "auto" else name}
            found = search_layout(drafter.head.ambiguous_options, **alone)
            given = " ".join(f"--drafter-options {option}={_option_text(value)}" for option, value in found.items())
            notes += [f"the {drafter.name} head drafts better with {given}"] * bool(found)
    return notes


def _option_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


def with_merged(model: CheckpointFacts, directory: str, quantization: QuantOptions | None) -> tuple[CheckpointFacts, AdapterDiagnosis]:
    """Return a model with the adapter of a directory merged, and the facts of the adapter.

    Args:
        quantization: how the merged model is quantised; None = not at all.

    Raises:
        PacelineError: it does not fit the model, or cannot be read.
    """
    path = Path(directory)
    adapter = _read_adapter(merged_adapter_name(path), path, model, read_adapter)
    config, weights = merge_adapter(adapter, model.config, model.weights, RuntimeOptions(quantization=quantization))
    return replace(model, config=config, weights=weights), AdapterDiagnosis.of(adapter)


def _read_adapter(name: str, directory: Path, model: CheckpointFacts, read: Callable[..., Adapter]) -> Adapter:
    with convert_memory_errors(f"the adapter {name!r}", "use an adapter of a lower rank, or close programs"):
        return read(directory, name=name, config=model.config, weights=model.weights, memory_bytes=available_memory_bytes())


def examine_drafter(
    name: str, target: CheckpointFacts, options: DoctorOptions, head_options: HeadOptions, problems: list[str], notes: list[str]
) -> DrafterDiagnosis:
    """Return the facts of one drafter and whether it fits a target.

    Args:
        name: as `paceline run` takes it.
        problems: gets a line where it cannot work.
        notes: gets a line where "auto" leaves a drafter out.
    """
    try:
        prepared = prepare_drafter(name, target.path, offline=True)
        if prepared is not None and prepared.notice:
            notes.append(prepared.notice)
        if prepared is None or prepared.path is None:
            return DrafterDiagnosis(name if prepared is None else prepared.name)
        if prepared.head is not None:
            head, pair = check_head(
                prepared.head, target, head_options, lm_head_copy_options(_draft_quant(target, options), options.quantization)
            )
            return DrafterDiagnosis(prepared.name, head=head, pair=pair)
        facts, adapter = read_checkpoint_facts(prepared.path, options.engine.max_model_len), None
        if options.speculation.draft_adapter is not None:
            facts, adapter = with_merged(facts, options.speculation.draft_adapter, _draft_quant(target, options))
        pair = check_draft_model(target, facts)
    except PacelineError as error:
        problems.append(str(error))
        return DrafterDiagnosis(name)
    if not pair.works:
        problems.append(f"the draft model {prepared.path} cannot draft for {target.path}: {pair.summary}")
    return DrafterDiagnosis(prepared.name, facts, pair=pair, adapter=adapter)


def _estimate(found: Diagnosis, target: CheckpointFacts, options: DoctorOptions) -> None:
    found.notes += target.weights.notices if options.quantization is None else ()
    dtype, max_model_len = options.engine.kv_cache_dtype, options.engine.max_model_len
    kv_cache_dtype = None if dtype == "auto" else KVCacheDtype(dtype)
    main = estimate_memory(
        target, options.quantization, _device(options), found.notes, kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len
    )
    if mixed := [repr(adapter.name) for adapter in found.adapters if adapter.num_mixed]:
        main = replace(
            main, cache_bytes_per_1k=2 * main.cache_bytes_per_1k, windows=tuple((rows, 2 * row_bytes) for rows, row_bytes in main.windows)
        )
        found.notes.append(f"X-LoRA ({', '.join(mixed)}): a step with it takes two passes, and keys and values are kept twice")
    drafts = [own for one in found.drafters if (own := _draft_memory(one, target, options, found.notes)) is not None]
    context = min(max_model_len or target.config.max_positions, target.config.max_positions)
    available = available_memory_bytes() if options.memory_bytes is None else options.memory_bytes
    found.memory = memory = MemoryEstimate(main, drafts, context, available, sum(adapter.nbytes for adapter in found.adapters))
    if not memory.fits:
        found.problems.append(
            f"weights take {memory.weights_bytes / _GIGABYTE:.3g} GB and 1000 tokens of cache "
            f"{memory.cache_bytes_per_1k / _GIGABYTE:.3g} GB, {available / _GIGABYTE:.3g} GB are free: use --quantization int8 or int4, "
            "a smaller model, or close other programs"
        )
    elif memory.context_that_fits < context:
        found.notes.append(
            f"a text of {context} tokens needs {memory.full_context_bytes / _GIGABYTE:.3g} GB in all, {available / _GIGABYTE:.3g} GB are "
            f"free: there is room for {memory.context_that_fits} tokens"
        )
    if options.quantization is not None:
        found.notes += _cache_notes()
    found.numerics, found.numerics_reason = (
        ("fast", "torch picks kernels by a pass's shape")
        if main.backend == "torch"
        else ("exact", "the native kernels compute every row on its own; tested again at load")
    )


def _cache_notes() -> list[str]:
    """Return a note on where quantised weights are cached, unless they are not."""
    directory, limit = cache_directory(), weights_cache_bytes()
    if directory is None or limit == 0:
        return []
    return [
        f"quantised weights are kept in {directory / CACHE_FOLDER} for next time: {cached_bytes(directory) / _GIGABYTE:.3g} GB of at most "
        f"{limit / _GIGABYTE:.3g} now (PACELINE_CACHE_GB; 0 keeps none)"
    ]


def _draft_memory(drafter: DrafterDiagnosis, target: CheckpointFacts, options: DoctorOptions, notes: list[str]) -> ModelMemory | None:
    """Return the memory of a drafter's network; None where it has none."""
    quantization, max_model_len = _draft_quant(target, options), options.engine.max_model_len
    if drafter.head is not None:
        return drafter.head.memory(quantization)
    if drafter.facts is None:
        return None
    return estimate_memory(drafter.facts, quantization, _device(options), notes, is_draft=True, max_model_len=max_model_len)


def _device(options: DoctorOptions) -> str:
    return "cuda" if options.engine.device == "cuda" else "cpu"


def _draft_quant(target: CheckpointFacts, options: DoctorOptions) -> QuantOptions | None:
    bits = mean_weight_bits(target.weights, options.quantization)
    return draft_quant_options(options.speculation.draft_quantization, bits, device=_device(options))
