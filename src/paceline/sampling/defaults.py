"""Sampling parameters of requests that leave them open: the values that the model's own files recommend.

A Hugging Face directory has them in generation_config.json, a GGUF file in metadata keys `general.sampling.*`. Conversations of models
without them are sampled at a moderate temperature, because greedy conversations repeat themselves. Texts are completed greedily where an
interface documents no other default.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import RequestError
from paceline.sampling.params import SamplingParams

DEFAULT_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Parameters that a model may recommend."""
CHAT_TEMPERATURE = 0.7
"""Of conversations with models that recommend no temperature."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters for requests that leave them open.

    Attributes:
        own: what the model recommends, by name; empty = nothing.
    """

    own: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, recommended: Iterable[tuple[str, float]]) -> "SamplingDefaults":
        """Keep the usable ones of a model's recommendations: one that `SamplingParams` refuses does not make the model unusable."""
        return cls({name: value for name, value in recommended if name in DEFAULT_NAMES and _is_usable(name, value)})

    @property
    def chat(self) -> dict[str, Any]:
        """The parameters of conversations."""
        return {"temperature": CHAT_TEMPERATURE, **self.own}

    def completion(self, documented: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of texts that are completed as they are.

        Args:
            documented: those of an interface, its temperature among them, for models that recommend nothing.
        """
        return {"temperature": documented["temperature"], **self.own} if self.own else dict(documented)

    def fill_chat(self, params: SamplingParams, given: Collection[str]) -> SamplingParams:
        """Return the parameters of a conversation.

        Args:
            given: names of the parameters that keep their value.
        """
        return replace(params, **{name: value for name, value in self.chat.items() if name not in given})

    def describe(self, params: SamplingParams) -> str:
        """Return one line on the parameters of conversations."""
        shown = ["greedy"] if params.is_greedy else [f"temperature {params.temperature:g}"]
        plain = SamplingParams()
        shown += [f"{name} {value:g}" for name in DEFAULT_NAMES[1:] if (value := getattr(params, name)) != getattr(plain, name)]
        origin = " (the model's own)" if self.own and all(getattr(params, name) == value for name, value in self.own.items()) else ""
        return f"sampling: {', '.join(shown)}{origin}"


def _is_usable(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except RequestError:
        return False
    return True
