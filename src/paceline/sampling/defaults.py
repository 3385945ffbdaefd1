"""Default sampling parameters: the values that the model's own files recommend.

A Hugging Face directory has them in generation_config.json, a GGUF file in metadata keys `general.sampling.*`. If a model recommends none,
conversations are sampled at a moderate temperature, because greedy conversations repeat themselves, and text completions use the defaults
that their interface documents.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import RequestError
from paceline.sampling.params import SamplingParams

DEFAULT_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Parameters that a model may recommend."""
CHAT_TEMPERATURE = 0.7
"""Temperature of conversations with models that recommend none."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Default sampling parameters of one model."""

    recommended: Mapping[str, float] = field(default_factory=dict)  # parameters that the model recommends, by name

    @classmethod
    def from_recommended(cls, recommended: Iterable[tuple[str, float]]) -> "SamplingDefaults":
        """Return the defaults of a model. Unknown parameters, and values that `SamplingParams` refuses, are left out."""
        return cls({name: value for name, value in recommended if name in DEFAULT_NAMES and _is_usable(name, value)})

    @property
    def chat(self) -> dict[str, Any]:
        """Parameters of conversations, by name."""
        return {"temperature": CHAT_TEMPERATURE, **self.recommended}

    def completion_defaults(self, documented_defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of text completions, by name.

        Args:
            documented_defaults: those that the interface documents, a temperature among them. If the model recommends parameters, only this
                temperature is used, unless the model recommends one.
        """
        return {"temperature": documented_defaults["temperature"], **self.recommended} if self.recommended else dict(documented_defaults)

    def fill_chat(self, params: SamplingParams, given: Collection[str]) -> SamplingParams:
        """Return the parameters of a conversation: `params`, with defaults for all names that are not in `given`."""
        return replace(params, **{name: value for name, value in self.chat.items() if name not in given})

    def describe(self, params: SamplingParams) -> str:
        """Return one line on the parameters of conversations."""
        shown = ["greedy"] if params.is_greedy else [f"temperature {params.temperature:g}"]
        neutral = SamplingParams()
        shown += [f"{name} {value:g}" for name in DEFAULT_NAMES[1:] if (value := getattr(params, name)) != getattr(neutral, name)]
        is_recommended = self.recommended and all(getattr(params, name) == value for name, value in self.recommended.items())
        origin = " (the model's own)" if is_recommended else ""
        return f"sampling: {', '.join(shown)}{origin}"


def _is_usable(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except RequestError:
        return False
    return True
