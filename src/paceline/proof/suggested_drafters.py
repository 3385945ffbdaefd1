"""Suggest drafters for a model by its name: built-in methods, published heads, smaller models of its family.

Each method has an assumed range of acceptance rates. With measured pass times the range becomes a range of speedups, by the formula of
`probe.best_draft_length`. Whether a published drafter's files fit is checked once they are on this machine.

Source of the tables: the publishers' model cards on the Hugging Face hub, and the README files of EAGLE, Medusa and speculators.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import QuantOptions
from paceline.drafters import MODEL_FREE_DRAFTERS
from paceline.errors import PacelineError
from paceline.models.checkpoint import is_gguf
from paceline.models.config import ModelConfig
from paceline.models.gguf.file import open_gguf
from paceline.models.layers import ExpertMLP
from paceline.models.quantize import quantization_schemes
from paceline.proof.checkpoint_facts import CheckpointFacts
from paceline.proof.probe import Prediction, best_draft_length
from paceline.small_files import read_json


@dataclass(frozen=True, slots=True)
class AssumedAcceptance:
    """Range of the probability that a draft token is accepted, given that those before it were."""

    low: float
    high: float
    source: str


ACCEPTANCE: Mapping[str, AssumedAcceptance] = {
    "draft_model": AssumedAcceptance(0.55, 0.80, "Leviathan et al. 2023, arXiv:2211.17192, table 3: two models of one family"),
    "eagle": AssumedAcceptance(0.60, 0.80, "Li et al. 2024, arXiv:2401.15077, table 2: chains, Vicuna and LLaMA2-Chat"),
    "eagle3": AssumedAcceptance(0.60, 0.80, "vLLM's acceptance-length test, Llama-3.1-8B on MT-bench (0.73, 0.71, 0.68 by depth)"),
    "peagle": AssumedAcceptance(0.55, 0.75, "as EAGLE-3, less because all positions are drafted in one pass"),
    "medusa": AssumedAcceptance(0.40, 0.60, "Cai et al. 2024, arXiv:2401.10774: the first head is right in about 60 %, later ones less"),
    "mtp": AssumedAcceptance(0.65, 0.85, "DeepSeek-V3, arXiv:2412.19437, section 5.4.3: 0.85 to 0.90 for the first token, later ones less"),
    "gemma4_assistant": AssumedAcceptance(0.60, 0.80, "model cards: 3.4 tokens a step with five draft tokens"),
    "dflash": AssumedAcceptance(0.55, 0.80, "as EAGLE-3, by the acceptance lengths on the model cards; not measured here"),
    "dflash2": AssumedAcceptance(0.55, 0.80, "as DFlash; not measured here"),
    "dspark": AssumedAcceptance(0.55, 0.80, "as DFlash; not measured here"),
    "pard2": AssumedAcceptance(0.55, 0.80, "as DFlash; not measured here"),
    "ngram": AssumedAcceptance(0.05, 0.55, "measured here: from new prose to text that repeats its prompt"),
    "suffix": AssumedAcceptance(0.05, 0.60, "measured here: from new prose to text that repeats earlier text"),
    "prediction": AssumedAcceptance(0.0, 0.95, "the share of the output that equals the predicted text"),
}

_LLAMA31_8B = "meta-llama/Llama-3.1-8B-Instruct meta-llama/Meta-Llama-3.1-8B-Instruct"
# (hub id, method, targets separated by spaces, parameters a draft token reads without embeddings and the target's own matrices)
PUBLISHED: tuple[tuple[str, str, str, float | None], ...] = (
    ("FasterDecoding/medusa-vicuna-7b-v1.3", "medusa", "lmsys/vicuna-7b-v1.3", 0.74e9),
    ("FasterDecoding/medusa-vicuna-13b-v1.3", "medusa", "lmsys/vicuna-13b-v1.3", 0.95e9),
    ("FasterDecoding/medusa-vicuna-33b-v1.3", "medusa", "lmsys/vicuna-33b-v1.3", 1.29e9),
    ("yuhuili/EAGLE-Vicuna-7B-v1.3", "eagle", "lmsys/vicuna-7b-v1.3", 0.24e9),
    ("yuhuili/EAGLE-Vicuna-13B-v1.3", "eagle", "lmsys/vicuna-13b-v1.3", 0.37e9),
    ("yuhuili/EAGLE-Vicuna-33B-v1.3", "eagle", "lmsys/vicuna-33b-v1.3", 0.56e9),
    ("yuhuili/EAGLE-llama2-chat-7B", "eagle", "meta-llama/Llama-2-7b-chat-hf", 0.24e9),
    ("yuhuili/EAGLE-llama2-chat-13B", "eagle", "meta-llama/Llama-2-13b-chat-hf", 0.37e9),
    ("yuhuili/EAGLE-llama2-chat-70B", "eagle", "meta-llama/Llama-2-70b-chat-hf", 0.99e9),
    ("yuhuili/EAGLE-mixtral-instruct-8x7B", "eagle", "mistralai/Mixtral-8x7B-Instruct-v0.1", 0.28e9),
    ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle", "meta-llama/Meta-Llama-3-8B-Instruct", 0.25e9),
    ("yuhuili/EAGLE-LLaMA3-Instruct-70B", "eagle", "meta-llama/Meta-Llama-3-70B-Instruct", 0.99e9),
    ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "eagle", _LLAMA31_8B, 0.25e9),
    ("yuhuili/EAGLE-Qwen2-7B-Instruct", "eagle", "Qwen/Qwen2-7B-Instruct", 0.26e9),
    ("yuhuili/EAGLE-Qwen2-72B-Instruct", "eagle", "Qwen/Qwen2-72B-Instruct", 1.05e9),
    ("yuhuili/EAGLE3-Vicuna1.3-13B", "eagle3", "lmsys/vicuna-13b-v1.3", 0.64e9),
    ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3", _LLAMA31_8B, 0.4e9),
    ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "eagle3", "meta-llama/Llama-3.3-70B-Instruct", 1.6e9),
    ("yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B", "eagle3", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 0.4e9),
    ("lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge", "eagle3", _LLAMA31_8B, 0.4e9),
    ("lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge", "eagle3", "meta-llama/Llama-3.3-70B-Instruct", 1.0e9),
    ("lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex", "eagle3", "Qwen/Qwen3-30B-A3B-Instruct-2507", 0.2e9),
    ("lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge", "eagle3", "Qwen/Qwen3-Coder-30B-A3B-Instruct", 0.2e9),
    ("lmsys/EAGLE3-gpt-oss-120b-bf16", "eagle3", "openai/gpt-oss-120b", None),
    ("nvidia/gpt-oss-120b-Eagle3-v3", "eagle3", "openai/gpt-oss-120b", 0.79e9),
    ("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "eagle3", _LLAMA31_8B, 0.4e9),
    ("RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3", "eagle3", "meta-llama/Llama-3.3-70B-Instruct", 1.0e9),
    ("RedHatAI/Qwen3-8B-speculator.eagle3", "eagle3", "Qwen/Qwen3-8B", 0.4e9),
    ("RedHatAI/Qwen3-14B-speculator.eagle3", "eagle3", "Qwen/Qwen3-14B", 0.61e9),
    ("RedHatAI/Qwen3-32B-speculator.eagle3", "eagle3", "Qwen/Qwen3-32B", 0.78e9),
    ("RedHatAI/gpt-oss-20b-speculator.eagle3", "eagle3", "openai/gpt-oss-20b", None),
    ("RedHatAI/gemma-4-31B-it-speculator.eagle3", "eagle3", "google/gemma-4-31B-it", None),
    ("AngelSlim/Qwen3-1.7B_eagle3", "eagle3", "Qwen/Qwen3-1.7B", 0.14e9),
    ("AngelSlim/Qwen3-4B_eagle3", "eagle3", "Qwen/Qwen3-4B", 0.22e9),
    ("AngelSlim/Qwen3-8B_eagle3", "eagle3", "Qwen/Qwen3-8B", 0.4e9),
    ("AngelSlim/Qwen3-14B_eagle3", "eagle3", "Qwen/Qwen3-14B", 0.61e9),
    ("AngelSlim/Qwen3-32B_eagle3", "eagle3", "Qwen/Qwen3-32B", 0.78e9),
    ("AngelSlim/Qwen3-a3B_eagle3", "eagle3", "Qwen/Qwen3-30B-A3B", 0.2e9),
    ("amazon/GPT-OSS-20B-P-EAGLE", "peagle", "openai/gpt-oss-20b", None),
    ("amazon/gpt-oss-120b-p-eagle", "peagle", "openai/gpt-oss-120b", None),
    ("amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE", "peagle", "Qwen/Qwen3-Coder-30B-A3B-Instruct", None),
    ("z-lab/Qwen3-4B-DFlash-b16", "dflash", "Qwen/Qwen3-4B", 0.5e9),
    ("z-lab/Qwen3-8B-DFlash-b16", "dflash", "Qwen/Qwen3-8B", 1.0e9),
    ("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "dflash", _LLAMA31_8B, None),
    ("z-lab/Qwen3-Coder-30B-A3B-DFlash", "dflash", "Qwen/Qwen3-Coder-30B-A3B-Instruct", None),
    ("z-lab/gpt-oss-20b-DFlash", "dflash", "openai/gpt-oss-20b", None),
    ("incoai/Qwen3.8-27B-DFlash2", "dflash2", "Qwen/Qwen3.8-27B", None),
    ("deepseek-ai/dspark_qwen3_4b_block7", "dspark", "Qwen/Qwen3-4B", 0.5e9),
    ("deepseek-ai/dspark_qwen3_8b_block7", "dspark", "Qwen/Qwen3-8B", 1.0e9),
    ("deepseek-ai/dspark_qwen3_14b_block7", "dspark", "Qwen/Qwen3-14B", None),
    ("deepseek-ai/dspark_gemma4_12b_block7", "dspark", "google/gemma-4-12B-it", None),
    ("LiquidAI/LFM2.5-1.2B-Instruct-DSpark", "dspark", "LiquidAI/LFM2.5-1.2B-Instruct", None),
    ("LiquidAI/LFM2.5-8B-A1B-DSpark", "dspark", "LiquidAI/LFM2.5-8B-A1B", None),
    ("amd/PARD2-Llama-3.1-8B", "pard2", _LLAMA31_8B, 1.27e9),
    ("amd/PARD2-Qwen3-8B", "pard2", "Qwen/Qwen3-8B", 0.61e9),
    ("amd/PARD2-Qwen3-14B", "pard2", "Qwen/Qwen3-14B", None),
    ("google/gemma-4-E2B-it-assistant", "gemma4_assistant", "google/gemma-4-E2B-it", 0.08e9),
    ("google/gemma-4-E4B-it-assistant", "gemma4_assistant", "google/gemma-4-E4B-it", 0.08e9),
    ("google/gemma-4-12B-it-assistant", "gemma4_assistant", "google/gemma-4-12B-it", 0.42e9),
    ("google/gemma-4-26B-A4B-it-assistant", "gemma4_assistant", "google/gemma-4-26B-A4B-it", 0.42e9),
    ("google/gemma-4-31B-it-assistant", "gemma4_assistant", "google/gemma-4-31B-it", 0.47e9),
)
MTP_FAMILIES = ("Qwen/Qwen3.5-", "Qwen/Qwen3.6-", "zai-org/GLM-4.5", "zai-org/GLM-4.6", "XiaomiMiMo/MiMo-7B-")
"""Beginnings of the ids of models whose own checkpoints hold a layer for multi-token prediction."""


def _sizes(pattern: str, *sizes: str) -> dict[str, float]:
    return {pattern.format(size): float(size[:-1]) * (1e9 if size[-1] in "bB" else 1e6) for size in sizes}


FAMILIES: tuple[dict[str, float], ...] = (
    {**_sizes("Qwen/Qwen3-{}", "0.6B", "1.7B", "4B", "8B", "14B", "32B"), "Qwen/Qwen3-30B-A3B": 30e9},
    _sizes("Qwen/Qwen2.5-{}-Instruct", "0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"),
    _sizes("Qwen/Qwen2.5-{}", "0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"),
    _sizes("Qwen/Qwen2.5-Coder-{}-Instruct", "0.5B", "1.5B", "3B", "7B", "14B", "32B"),
    _sizes("Qwen/Qwen2-{}-Instruct", "0.5B", "1.5B", "7B", "72B"),
    {
        **_sizes("meta-llama/Llama-3.2-{}-Instruct", "1B", "3B"),
        **_sizes("meta-llama/Llama-3.1-{}-Instruct", "8B", "70B"),
        **_sizes("meta-llama/Meta-Llama-3.1-{}-Instruct", "8B", "70B"),
        **_sizes("meta-llama/Llama-3.3-{}-Instruct", "70B"),
    },
    {**_sizes("meta-llama/Llama-3.2-{}", "1B", "3B"), **_sizes("meta-llama/Llama-3.1-{}", "8B", "70B")},
    _sizes("google/gemma-2-{}-it", "2b", "9b", "27b"),
    _sizes("google/gemma-3-{}-it", "270m", "1b", "4b", "12b", "27b"),
    _sizes("HuggingFaceTB/SmolLM2-{}-Instruct", "135M", "360M", "1.7B"),
)
"""Models that share a tokenizer, with their parameters."""

_MAX_SIBLING_SHARE = 0.5  # of the target's parameters; a larger draft model costs nearly as much as the target
_MAX_SIBLINGS = 2
_SMALL_NETWORK_FACTOR = 1.5
"""Seconds a byte of a drafter's pass over those of the target's: 1.4 to 1.7 (docs/dev/findings.md)."""
_PROPOSE_S = 1e-4  # host time of a proposal: 0.07 to 0.17 ms (docs/dev/findings.md)
_PARALLEL_METHODS = ("medusa", "peagle", "pard2")  # draft all positions in one pass
_READS_LM_HEAD = ("eagle", "mtp")  # compute logits with the target's vocabulary matrix
_EXPERT = re.compile(r"layers\.(\d+)\.experts\.")
_HUB_CACHE_FOLDER = re.compile(r"models--(.+)")  # models--OWNER--NAME/snapshots/COMMIT
_STORAGE_SUFFIXES = re.compile(  # -GPTQ-Int4, -qat-q4_0-gguf, -Q4_K_M-00001-of-00002
    r"(?:(?:-ud)?[-._](?:i?q\d\w*+|f16|f32|bf16|fp16|fp8|mxfp4|int4|int8|awq|gptq|gguf|qat))*(?:-\d{5}-of-\d{5})?$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Measured costs of the target.

    Attributes:
        pass_s: seconds of a pass by its number of rows.
        row_bytes: bytes of weights that a pass of one row reads.
        lm_head_bytes: bytes of the matrix that computes logits.
    """

    pass_s: Mapping[int, float]
    row_bytes: float
    lm_head_bytes: float


@dataclass(frozen=True, slots=True)
class SuggestedDrafter:
    """A drafter that could be used.

    Attributes:
        drafter: the value of `--drafter`.
        location: "built_in", "checkpoint" (the target's own files) or "hub".
        parameters: of its network; None = it has none, or the number is not published.
        slowest, fastest: predictions for both ends of the acceptance range; None = not measured, or of unknown size.
    """

    drafter: str
    method: str
    location: str
    parameters: float | None
    acceptance: AssumedAcceptance
    slowest: Prediction | None = None
    fastest: Prediction | None = None


def suggest_drafters(
    names: Iterable[str], costs: PassCosts | None = None, *, quantization: QuantOptions | None = None
) -> list[SuggestedDrafter]:
    """Return the drafters known for a model; with costs in descending order of the lowest predicted speedup.

    Args:
        names: names of the target, from `model_names`.
        costs: measured costs; None = nothing is predicted.
        quantization: how drafters are quantised while loading; None = not at all.
    """
    known = set(names)
    found: list[tuple[str, str, str, float | None]] = [(method, method, "built_in", None) for method in MODEL_FREE_DRAFTERS]
    if any(name.startswith(tuple(map(_base_name, MTP_FAMILIES))) for name in known):
        found.append(("mtp", "mtp", "checkpoint", None))
    for hub_id, method, targets, parameters in PUBLISHED:
        if known & set(map(_base_name, targets.split())):
            found.append((hub_id, method, "hub", parameters))
    found += [(hub_id, "draft_model", "hub", parameters) for hub_id, parameters in _smaller_siblings(known)]
    suggested = [
        SuggestedDrafter(drafter, method, location, parameters, ACCEPTANCE[method], *_predict(method, parameters, costs, quantization))
        for drafter, method, location, parameters in found
    ]
    return sorted(suggested, key=lambda one: 0.0 if one.slowest is None else -round(one.slowest.speedup, 2))


def recommend_drafter(suggested: Sequence[SuggestedDrafter]) -> SuggestedDrafter | None:
    """Return the drafter on the Hub with the largest predicted speedup; None if none pays, or the target's own files have one.

    Without predictions, the drafter with the highest assumed acceptance is returned; of equal ones, one that does not read the target's
    LM head for each draft token.
    """
    published = [one for one in suggested if one.location == "hub" and (one.fastest is None or one.fastest.speedup > 1.0)]
    if not published or any(one.location == "checkpoint" for one in suggested):
        return None
    if any(one.slowest is not None for one in published):
        return max(published, key=lambda one: 0.0 if one.slowest is None else one.slowest.speedup)
    return max(published, key=lambda one: (one.acceptance.low + one.acceptance.high, one.method not in _READS_LM_HEAD))


def _predict(method: str, parameters: float | None, costs: PassCosts | None, quantization: QuantOptions | None) -> list[Prediction]:
    """Return the predictions for both ends of the acceptance range; nothing without measured costs or a known size."""
    if costs is None or parameters is None:  # of lookup, the speedup depends on how repetitive the text is; --probe measures it
        return []
    num_bytes = parameters * (2.0 if quantization is None else quantization.bits / 8 + 2 / quantization.group)
    num_bytes += costs.lm_head_bytes if method in _READS_LM_HEAD else 0.0
    pass_s = _SMALL_NETWORK_FACTOR * num_bytes * costs.pass_s[1] / costs.row_bytes
    token_s, fixed_s = (0.0, _PROPOSE_S + pass_s) if method in _PARALLEL_METHODS else (pass_s, _PROPOSE_S)
    return [best_draft_length(rate, costs.pass_s, token_s, fixed_s) for rate in (ACCEPTANCE[method].low, ACCEPTANCE[method].high)]


def _smaller_siblings(known: Collection[str]) -> list[tuple[str, float]]:
    """Return the smallest models of the target's family with their parameters, smallest first."""
    for family in FAMILIES:
        target = next((parameters for hub_id, parameters in family.items() if _base_name(hub_id) in known), None)
        if target is not None:
            smaller = [(hub_id, parameters) for hub_id, parameters in family.items() if parameters <= _MAX_SIBLING_SHARE * target]
            return sorted(smaller, key=lambda one: one[1])[:_MAX_SIBLINGS]
    return []


def pass_costs(target: CheckpointFacts, quantization: QuantOptions | None, pass_s: Mapping[int, float]) -> PassCosts:
    """Return the costs of a target whose passes were timed.

    Embeddings are not counted, because a pass looks up one row. Of experts only the chosen share is counted.
    """
    schemes = {} if quantization is None else quantization_schemes(target.weights, quantization)
    facts = {name: target.weights.tensor_info(name) for name in target.weights}
    sizes = {name: schemes[name].nbytes(fact.shape) if name in schemes else fact.nbytes for name, fact in facts.items()}
    tables = {"layer_embedding.weight", *(() if target.config.tied_embeddings else ("embedding.weight",))}
    row_bytes = sum(size * _read_share(name, target.config) for name, size in sizes.items() if name not in tables)
    return PassCosts(pass_s, row_bytes, next(sizes[name] for name in ("lm_head.weight", "embedding.weight") if name in sizes))


def _read_share(name: str, config: ModelConfig) -> float:
    match = _EXPERT.match(name)
    mlp = config.layers[int(match[1])].mlp if match is not None else None
    return mlp.routing.num_experts_per_token / mlp.routing.num_experts if isinstance(mlp, ExpertMLP) else 1.0


def model_names(model: str, path: Path | None) -> tuple[str, ...]:
    """Return names by which the tables may list a model: without owner and weight type, in small letters.

    Args:
        model: the value of `--model`.
        path: of its files; None = they are not on this machine.
    """
    found = [model]
    if path is not None:
        cached = [match[1].replace("--", "/") for part in path.parts if (match := _HUB_CACHE_FOLDER.fullmatch(part))]
        found = [*cached, path.stem if path.is_file() else path.name, *_names_in_metadata(path)]
    return tuple(dict.fromkeys(name for one in found if (name := _STORAGE_SUFFIXES.sub("", _base_name(one)))))


def _names_in_metadata(path: Path) -> list[str]:
    try:
        if is_gguf(path):
            metadata = open_gguf(path).metadata
            names = [metadata.get("general.name"), metadata.get("general.basename")]
        else:
            names = [(read_json(path / "config.json") or {}).get("_name_or_path")]
    except PacelineError:  # opening the model reports it
        return []
    return [name.replace(" ", "-") for name in names if isinstance(name, str)]


def _base_name(model: str) -> str:
    return model.rpartition("/")[2].lower()
