"""Samples: the reply of a worker to one request, and values derived from it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens of one request, and when each arrived, in seconds since the request was sent; several may share a time."""

    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request in one mode.

    Attributes:
        mode, workload, temperature, prompt: which; `prompt` counts within the workload, of a batch it is that of the first request.
        round: 0 = warm-up, not counted.
        outputs: one; of a batch, one a request.
        seconds: from the request to the last token.
        drafted, accepted: draft tokens and accepted ones; None where a program does not report them.
        steps, passes, decoding_passes: of the target; decoding passes began when every request had a token.
        host_s: outside of the kernels.
        num_prompt_tokens: of all requests.
    """

    mode: str
    workload: str
    temperature: float
    prompt: int
    round: int
    outputs: tuple[Output, ...]
    seconds: float
    num_prompt_tokens: int
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    steps: int | None = None
    passes: int | None = None
    decoding_passes: int | None = None
    host_s: float | None = None
    rss_bytes: int | None = None
    peak_rss_bytes: int | None = None

    @classmethod
    def of(cls, answer: Mapping[str, Any], **known: Any) -> "Sample":
        """Make a sample of a worker's reply.

        Raises:
            KeyError, TypeError, ValueError: the reply breaks the protocol.
        """
        given = answer.get("outputs", [answer])
        outputs = tuple(Output(tuple(map(int, one["token_ids"])), tuple(map(float, one["times_s"]))) for one in given)
        if any(len(one.token_ids) != len(one.times_s) or not one.token_ids for one in outputs):
            raise ValueError("an output without tokens, or without a time for each of them")
        names = ("num_draft_tokens", "num_accepted_tokens", "steps", "passes", "decoding_passes", "host_s", "rss_bytes", "peak_rss_bytes")
        fields: dict[str, Any] = {name: answer.get(name) for name in names} | known
        return cls(outputs=outputs, seconds=float(answer["seconds"]), **fields)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token; of a batch, the mean."""
        return sum(output.times_s[0] for output in self.outputs) / len(self.outputs)

    @property
    def decoding_start_s(self) -> float:
        """Seconds until every request had its first token."""
        return max(output.times_s[0] for output in self.outputs)

    @property
    def decoding_s(self) -> float:
        """Seconds from then to the last token; the whole time if all tokens arrived at once."""
        last = max(output.times_s[-1] for output in self.outputs)
        return last - self.decoding_start_s if last > self.decoding_start_s else self.seconds

    @property
    def num_decoded(self) -> int:
        """Tokens that arrived in that time."""
        start = self.decoding_start_s
        return sum(time > start for output in self.outputs for time in output.times_s) or self.num_tokens

    @property
    def gaps_s(self) -> list[float]:
        """Times between moments at which tokens of a request arrived; tokens that arrive together have one gap before them."""
        return [after - before for output in self.outputs for before, after in pairwise(output.times_s) if after > before]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step; where steps are not reported, emitted - accepted is their number."""
        if self.steps:
            return self.num_tokens / self.steps
        return None if self.num_accepted_tokens is None else self.num_tokens / max(1, self.num_tokens - self.num_accepted_tokens)

    def as_dict(self) -> dict[str, Any]:
        outputs = [{"token_ids": list(one.token_ids), "times_s": [round(time, 6) for time in one.times_s]} for one in self.outputs]
        return asdict(self) | {"outputs": outputs}
