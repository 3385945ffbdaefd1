"""Outputs of finished requests, and chunks of streamed outputs."""

from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.sampling.logprobs import TokenLogprobs
from paceline.speculation.request import TokenOrigin
from paceline.speculation.stats import SpeculationStats, StepRecord

_HINTS_FOR_OTHER_NAMES = {
    "outputs": "it is one output itself, use .text; with n > 1 there is one RequestOutput for each sample",
    "generated_text": "use .text",
    "num_tokens": "use .usage",
    "stop_reason": "use .finish_reason and .stop_text",
    "cumulative_logprob": "use .logprobs",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    Attributes:
        num_cached_tokens: prompt tokens whose rows were found in the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    num_cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall-clock seconds of a request: `prompt_s` until its first token, `decode_s` from there to its end, and `total_s`."""

    prompt_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prompt_s + self.decode_s


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A tool call that the model wrote.

    Attributes:
        name: name of the tool.
        arguments: arguments by name.
        id: id of the call, taken from the model's output or generated.
        is_complete: False if the output ended within a string argument. Do not run such a call.
    """

    name: str
    arguments: dict[str, Any]
    id: str
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One generated text.

    Attributes:
        text: text of the output, without special tokens, and without the stop string unless `include_stop` is set. In chats it includes
            reasoning and tool calls as the model wrote them.
        token_ids: output tokens, including the EOS or stop token.
        finish_reason: "stop" (EOS, stop token or stop string), "length" (max_tokens or the end of the context) or "abort".
        seed: the seed that was used; a random one if none was given.
        numerics: "exact" or "fast".
        drafter: name of the drafter that the request selected, or of all loaded drafters; "none" = plain decoding.
        speculation: counters of the request's steps and draft tokens.
        origins: for each output token, whether it is a token of a step without a draft, an accepted draft token or a bonus token.
        sample_index: index among the samples of the prompt.
        logprobs: log-probabilities of each output token, if requested.
        prompt_logprobs: log-probabilities of each prompt token, if requested; None for the first token, which has no prediction.
        stop_text: the stop string that ended the output; None = it did not end with a stop string.
        steps: the draft of every step, if requested.
        content, reasoning, tool_calls: the parts of a chat's text. None = the text has no content or reasoning.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    usage: Usage
    timing: Timing
    seed: int
    numerics: str
    drafter: str = "none"
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    origins: list[TokenOrigin] = field(default_factory=list)
    sample_index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_text: str | None = None
    steps: list[StepRecord] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError. For attributes that other libraries have, the error names ours."""
        hint = _HINTS_FOR_OTHER_NAMES.get(name)
        raise AttributeError(f"a RequestOutput has no {name}{f': {hint}' if hint else ''}", name=name, obj=self)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens after the first one, per second of decoding; 0 if there is at most one token."""
        return (len(self.token_ids) - 1) / self.timing.decode_s if self.timing.decode_s > 0 and self.token_ids else 0.0

    def as_dict(self, *, model: str, version: str) -> dict[str, Any]:
        """Return the output as the JSON object that `paceline run --json` prints."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_token_ids,
            "finish_reason": self.finish_reason,
            "usage": asdict(self.usage) | {"total_tokens": self.usage.total_tokens},
            "timing": {name: round(getattr(self.timing, name), 6) for name in ("prompt_s", "decode_s", "total_s")},
            "seed": self.seed,
            "numerics": self.numerics,
            "drafter": self.drafter,
            "speculation": self.speculation.as_dict(),
            **({} if self.steps is None else {"steps": [step.as_dict() for step in self.steps]}),
            "model": model,
            "version": version,
        }


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """New tokens of a streamed request.

    Attributes:
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids, origins: the tokens since the previous chunk, and their origins.
        output: the whole output, in the last chunk only.
        sample_index: index among the samples of the prompt.
        logprobs: log-probabilities of these tokens, if requested.
        usage: token counts of the sample so far.
        prompt_token_ids, prompt_logprobs: the prompt, in the first chunk of each sample, if `prompt_logprobs` are requested.
        steps: the drafts of the steps that emitted these tokens, if requested.
    """

    text: str
    token_ids: list[int]
    origins: list[TokenOrigin]
    output: RequestOutput | None = None
    sample_index: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    usage: Usage = Usage(0, 0)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
