"""Default sampling parameters: the values that the model's own files recommend.

A Hugging Face directory has them in generation_config.json, a GGUF file in metadata keys `general.sampling.*`. If a model recommends none,
text completions use the defaults of their HTTP API, and chat a moderate temperature, because greedy answers repeat themselves.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import RequestError
from paceline.sampling.params import SamplingParams

RECOMMENDABLE_PARAMS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Parameters that a model may recommend."""
CHAT_TEMPERATURE = 0.7
"""Temperature of chat with models that recommend none."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Default sampling parameters of one model."""

    recommended: Mapping[str, float] = field(default_factory=dict)  # parameters that the model recommends, by name

    @classmethod
    def from_recommended(cls, recommended: Iterable[tuple[str, float]]) -> "SamplingDefaults":
        """Return the defaults of a model. Unknown parameters, and values that `SamplingParams` rejects, are left out."""
        return cls({name: value for name, value in recommended if name in RECOMMENDABLE_PARAMS and _is_usable(name, value)})

    @property
    def chat(self) -> dict[str, Any]:
        """Default parameters of chat, by name."""
        return {"temperature": CHAT_TEMPERATURE, **self.recommended}

    def completion_defaults(self, api_defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the default parameters of text completions, by name.

        Args:
            api_defaults: defaults of the HTTP API, including a temperature. They are used if the model recommends no parameters. If it
                recommends some parameters but no temperature, only the temperature is taken from them.
        """
        return {"temperature": api_defaults["temperature"], **self.recommended} if self.recommended else dict(api_defaults)

    def apply_chat_defaults(self, params: SamplingParams, explicit: Collection[str]) -> SamplingParams:
        """Return `params` with the defaults of chat for all parameters whose names are not in `explicit`."""
        return replace(params, **{name: value for name, value in self.chat.items() if name not in explicit})

    def describe(self, params: SamplingParams) -> str:
        """Return a line for the user that lists the sampling parameters `params`, and whether they are the model's own."""
        shown = ["greedy"] if params.is_greedy else [f"temperature {params.temperature:g}"]
        neutral = SamplingParams()
        shown += [f"{name} {value:g}" for name in RECOMMENDABLE_PARAMS[1:] if (value := getattr(params, name)) != getattr(neutral, name)]
        is_recommended = self.recommended and all(getattr(params, name) == value for name, value in self.recommended.items())
        origin = " (the model's own)" if is_recommended else ""
        return f"sampling: {', '.join(shown)}{origin}"


def _is_usable(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except RequestError:
        return False
    return True
