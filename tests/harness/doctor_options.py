"""Options of a diagnosis from arguments of `paceline.LLM`."""

from collections.abc import Sequence
from typing import Any

from paceline.config import EngineConfig, SpeculationConfig
from paceline.proof.doctor import DoctorOptions

_OF_SPECULATION = ("draft_quantization", "draft_adapter", "drafter_options")


def doctor_options(
    *, drafters: Sequence[str] = ("auto",), memory_bytes: int | None = None, probe_arguments: dict[str, Any] | None = None, **given: Any
) -> DoctorOptions:
    speculation = {name: given.pop(name) for name in _OF_SPECULATION if name in given}
    return DoctorOptions(
        engine=EngineConfig(**given),
        speculation=SpeculationConfig(drafter=tuple(drafters), **speculation),
        memory_bytes=memory_bytes,
        probe_arguments=probe_arguments,
    )
