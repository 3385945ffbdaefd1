"""Drafters that were published for models: a table of names. Whether their files fit, doctor says once they are here.

Source: the model cards of their publishers on the Hugging Face hub, and the README files of EAGLE, Medusa and speculators.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.drafters.head_kinds import HeadKind


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A head for one model.

    Attributes:
        hub_id: on the Hugging Face hub.
        method: what it guesses with.
        targets: ids of the models it was made for; the same weights under several names.
        parameters: values that a guess reads, embeddings and the target's own matrices not counted; about. None = not published.
    """

    hub_id: str
    method: HeadKind
    targets: tuple[str, ...]
    parameters: float | None


_LLAMA31_8B = ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct")
_MEDUSA, _EAGLE, _EAGLE3, _PEAGLE = HeadKind.MEDUSA, HeadKind.EAGLE, HeadKind.EAGLE3, HeadKind.PEAGLE
_ASSISTANT = HeadKind.GEMMA4_ASSISTANT

PUBLISHED: tuple[PublishedDrafter, ...] = tuple(
    PublishedDrafter(hub_id, method, (targets,) if isinstance(targets, str) else targets, parameters)
    for hub_id, method, targets, parameters in (
        ("FasterDecoding/medusa-vicuna-7b-v1.3", _MEDUSA, "lmsys/vicuna-7b-v1.3", 0.74e9),
        ("FasterDecoding/medusa-vicuna-13b-v1.3", _MEDUSA, "lmsys/vicuna-13b-v1.3", 0.95e9),
        ("FasterDecoding/medusa-vicuna-33b-v1.3", _MEDUSA, "lmsys/vicuna-33b-v1.3", 1.29e9),
        ("yuhuili/EAGLE-Vicuna-7B-v1.3", _EAGLE, "lmsys/vicuna-7b-v1.3", 0.24e9),
        ("yuhuili/EAGLE-Vicuna-13B-v1.3", _EAGLE, "lmsys/vicuna-13b-v1.3", 0.37e9),
        ("yuhuili/EAGLE-Vicuna-33B-v1.3", _EAGLE, "lmsys/vicuna-33b-v1.3", 0.56e9),
        ("yuhuili/EAGLE-llama2-chat-7B", _EAGLE, "meta-llama/Llama-2-7b-chat-hf", 0.24e9),
        ("yuhuili/EAGLE-llama2-chat-13B", _EAGLE, "meta-llama/Llama-2-13b-chat-hf", 0.37e9),
        ("yuhuili/EAGLE-llama2-chat-70B", _EAGLE, "meta-llama/Llama-2-70b-chat-hf", 0.99e9),
        ("yuhuili/EAGLE-mixtral-instruct-8x7B", _EAGLE, "mistralai/Mixtral-8x7B-Instruct-v0.1", 0.28e9),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", _EAGLE, "meta-llama/Meta-Llama-3-8B-Instruct", 0.25e9),
        ("yuhuili/EAGLE-LLaMA3-Instruct-70B", _EAGLE, "meta-llama/Meta-Llama-3-70B-Instruct", 0.99e9),
        ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", _EAGLE, _LLAMA31_8B, 0.25e9),
        ("yuhuili/EAGLE-Qwen2-7B-Instruct", _EAGLE, "Qwen/Qwen2-7B-Instruct", 0.26e9),
        ("yuhuili/EAGLE-Qwen2-72B-Instruct", _EAGLE, "Qwen/Qwen2-72B-Instruct", 1.05e9),
        ("yuhuili/EAGLE3-Vicuna1.3-13B", _EAGLE3, "lmsys/vicuna-13b-v1.3", 0.64e9),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", _EAGLE3, _LLAMA31_8B, 0.4e9),
        ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", _EAGLE3, "meta-llama/Llama-3.3-70B-Instruct", 1.6e9),
        ("yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B", _EAGLE3, "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 0.4e9),
        ("lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge", _EAGLE3, _LLAMA31_8B, 0.4e9),
        ("lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge", _EAGLE3, "meta-llama/Llama-3.3-70B-Instruct", 1.0e9),
        ("lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex", _EAGLE3, "Qwen/Qwen3-30B-A3B-Instruct-2507", 0.2e9),
        ("lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge", _EAGLE3, "Qwen/Qwen3-Coder-30B-A3B-Instruct", 0.2e9),
        ("lmsys/EAGLE3-gpt-oss-120b-bf16", _EAGLE3, "openai/gpt-oss-120b", None),
        ("nvidia/gpt-oss-120b-Eagle3-v3", _EAGLE3, "openai/gpt-oss-120b", 0.79e9),
        ("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", _EAGLE3, _LLAMA31_8B, 0.4e9),
        ("RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3", _EAGLE3, "meta-llama/Llama-3.3-70B-Instruct", 1.0e9),
        ("RedHatAI/Qwen3-8B-speculator.eagle3", _EAGLE3, "Qwen/Qwen3-8B", 0.4e9),
        ("RedHatAI/Qwen3-14B-speculator.eagle3", _EAGLE3, "Qwen/Qwen3-14B", 0.61e9),
        ("RedHatAI/Qwen3-32B-speculator.eagle3", _EAGLE3, "Qwen/Qwen3-32B", 0.78e9),
        ("RedHatAI/gpt-oss-20b-speculator.eagle3", _EAGLE3, "openai/gpt-oss-20b", None),
        ("RedHatAI/gemma-4-31B-it-speculator.eagle3", _EAGLE3, "google/gemma-4-31B-it", None),
        ("AngelSlim/Qwen3-1.7B_eagle3", _EAGLE3, "Qwen/Qwen3-1.7B", 0.14e9),
        ("AngelSlim/Qwen3-4B_eagle3", _EAGLE3, "Qwen/Qwen3-4B", 0.22e9),
        ("AngelSlim/Qwen3-8B_eagle3", _EAGLE3, "Qwen/Qwen3-8B", 0.4e9),
        ("AngelSlim/Qwen3-14B_eagle3", _EAGLE3, "Qwen/Qwen3-14B", 0.61e9),
        ("AngelSlim/Qwen3-32B_eagle3", _EAGLE3, "Qwen/Qwen3-32B", 0.78e9),
        ("AngelSlim/Qwen3-a3B_eagle3", _EAGLE3, "Qwen/Qwen3-30B-A3B", 0.2e9),
        ("amazon/GPT-OSS-20B-P-EAGLE", _PEAGLE, "openai/gpt-oss-20b", None),
        ("amazon/gpt-oss-120b-p-eagle", _PEAGLE, "openai/gpt-oss-120b", None),
        ("amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE", _PEAGLE, "Qwen/Qwen3-Coder-30B-A3B-Instruct", None),
        ("google/gemma-4-E2B-it-assistant", _ASSISTANT, "google/gemma-4-E2B-it", 0.08e9),
        ("google/gemma-4-E4B-it-assistant", _ASSISTANT, "google/gemma-4-E4B-it", 0.08e9),
        ("google/gemma-4-12B-it-assistant", _ASSISTANT, "google/gemma-4-12B-it", 0.42e9),
        ("google/gemma-4-26B-A4B-it-assistant", _ASSISTANT, "google/gemma-4-26B-A4B-it", 0.42e9),
        ("google/gemma-4-31B-it-assistant", _ASSISTANT, "google/gemma-4-31B-it", 0.47e9),
    )
)

OWN_MODULES = ("Qwen/Qwen3.5-", "Qwen/Qwen3.6-", "zai-org/GLM-4.5", "zai-org/GLM-4.6", "XiaomiMiMo/MiMo-7B-")
"""How the ids of models begin whose own files hold a layer for multi-token prediction."""


def published_for(names: Iterable[str]) -> list[PublishedDrafter]:
    """The drafters made for a model that goes by any of these names, in the order of the table.

    Args:
        names: as `recommend.names_of` gives them, without owners.
    """
    wanted = set(names)
    return [drafter for drafter in PUBLISHED if any(plain_name(target) in wanted for target in drafter.targets)]


def has_own_module(names: Iterable[str]) -> bool:
    """Whether the files of a model of these names hold a layer for multi-token prediction."""
    begins = tuple(plain_name(beginning) for beginning in OWN_MODULES)
    return any(name.startswith(begins) for name in names)


def plain_name(model: str) -> str:
    """A model's id without its owner, in small letters."""
    return model.rpartition("/")[2].lower()
