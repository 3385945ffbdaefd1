"""A model with a fixed output, for tests of the command line."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.errors import PacelineError
from paceline.outputs import RequestOutput, StreamChunk, Timing, Usage
from paceline.sampling.defaults import SamplingDefaults
from paceline.sampling.params import SamplingParams
from paceline.speculation.request import TokenOrigin
from paceline.speculation.stats import SkipCounts, SkipReason, SpeculationStats, StepRecord

PLAIN, ACCEPTED, BONUS = TokenOrigin.PLAIN, TokenOrigin.ACCEPTED, TokenOrigin.BONUS

# one step a row: (piece of a token as bytes, where it came from); a character is split over the last step's tokens
STEPS: list[list[tuple[bytes, TokenOrigin]]] = [
    [(b"The", PLAIN)],
    [(b" quick", ACCEPTED), (b" brown", ACCEPTED), (b" fox", BONUS)],
    [(b" caf", ACCEPTED), (b"\xc3", ACCEPTED), (b"\xa9", BONUS)],
]
TEXT = "The quick brown fox café"
NUM_TOKENS = 7


class FakeDetokenizer:
    """Holds bytes back until they are a character."""

    def __init__(self) -> None:
        self._pieces = [piece for step in STEPS for piece, _ in step]
        self._pending = b""

    def push(self, token_id: int) -> str:
        self._pending += self._pieces[token_id]
        try:
            text = self._pending.decode()
        except UnicodeDecodeError:
            return ""
        self._pending = b""
        return text


class FakeTokenizer:
    has_chat_template = True

    def check_chat_template(self) -> None:
        """There is nothing wrong with it."""

    def detokenizer(self) -> FakeDetokenizer:
        return FakeDetokenizer()


class FakeLLM:
    """Returns a fixed output and records the arguments of calls."""

    made: "list[FakeLLM]"
    fails_at: int | None = None  # step
    failure: BaseException = KeyboardInterrupt()
    load_failure: PacelineError | None = None
    steps = STEPS
    text = TEXT
    recommended: Mapping[str, float] = MappingProxyType({})
    max_model_len = 100_000

    def __init__(self, **arguments: Any) -> None:
        if self.load_failure is not None:
            raise self.load_failure
        self.arguments = arguments
        self.asked: list[Any] = []
        self.params: SamplingParams | None = None
        self.tokenizer = FakeTokenizer()
        self.notices = ["a notice"]
        self.banner = "a banner"
        self.sampling_defaults = SamplingDefaults(self.recommended)
        self.closed_streams = 0
        self.made.append(self)

    def chat_token_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A token for each character."""
        return [0] * sum(len(message["content"]) for message in messages)

    def explain(self, output: RequestOutput) -> list[str]:
        return ["an explanation"]

    def generate(self, prompt: str, params: SamplingParams, *, adapter: str | None = None, **options: Any) -> list[RequestOutput]:
        self._remember(prompt, params, adapter)
        return [self._output()]

    def chat(
        self, messages: Sequence[dict[str, str]], params: SamplingParams, *, adapter: str | None = None, **options: Any
    ) -> RequestOutput:
        self._remember(list(messages), params, adapter)
        return self._output()

    def stream(self, prompt: str, params: SamplingParams, *, adapter: str | None = None, **options: Any) -> Iterator[StreamChunk]:
        self._remember(prompt, params, adapter)
        return self._stream()

    def stream_chat(
        self, messages: Sequence[dict[str, str]], params: SamplingParams, *, adapter: str | None = None, **options: Any
    ) -> Iterator[StreamChunk]:
        self._remember(list(messages), params, adapter)
        return self._stream()

    def _remember(self, asked: Any, params: SamplingParams, adapter: str | None) -> None:
        self.asked.append(asked)
        self.params, self.adapter = params, adapter

    def _stream(self) -> Iterator[StreamChunk]:
        detokenizer, token_id, num_left = FakeDetokenizer(), 0, len(self.text)
        try:
            for number, step in enumerate(self.steps):
                if number == self.fails_at:
                    raise self.failure
                ids = list(range(token_id, token_id + len(step)))
                text = "".join(detokenizer.push(one) for one in ids)[:num_left]
                token_id, num_left = token_id + len(step), num_left - len(text)
                records = [_record(step, ids)]
                is_last = number == len(self.steps) - 1
                yield StreamChunk(text, ids, [origin for _, origin in step], self._output() if is_last else None, steps=records)
        finally:
            self.closed_streams += 1

    def _output(self) -> RequestOutput:
        reasons = SkipCounts({SkipReason.PROMPT: 1})
        stats = SpeculationStats(
            steps=3,
            num_draft_tokens=8,
            num_accepted_tokens=4,
            num_emitted_tokens=7,
            num_draft_tokens_by_position=[2],
            num_accepted_tokens_by_position=[2],
            skip_counts=reasons,
        )
        return RequestOutput(
            text=self.text,
            token_ids=list(range(NUM_TOKENS)),
            prompt_token_ids=[5, 6],
            finish_reason="length",
            usage=Usage(2, NUM_TOKENS),
            timing=Timing(0.1, 0.5),
            seed=77,
            numerics="exact",
            drafter="ngram",
            speculation=stats,
        )


def _record(step: list[tuple[bytes, TokenOrigin]], ids: Sequence[int]) -> StepRecord:
    """One more token was drafted than accepted, where any was."""
    num_accepted = sum(origin is ACCEPTED for _, origin in step)
    num_drafted = num_accepted + 1 if num_accepted == 2 and ids[0] == 1 else num_accepted
    return StepRecord(
        start=ids[0],
        token_ids=tuple(ids),
        draft_token_ids=tuple(range(num_drafted)),
        parents=tuple(range(num_drafted)),
        sources=("ngram",) * num_drafted,
        accepted_nodes=tuple(range(1, 1 + num_accepted)),
    )


class EchoLLM(FakeLLM):
    """Echoes the last message, and waits in the middle while the file `gate` exists."""

    gate: Path

    def stream_chat(
        self, messages: Sequence[dict[str, str]], params: SamplingParams, *, adapter: str | None = None, **options: Any
    ) -> Iterator[StreamChunk]:
        self._remember(list(messages), params, adapter)
        self.text = f"you said {messages[-1]['content']!r} to me"
        return self._echo()

    def _echo(self) -> Iterator[StreamChunk]:
        half = len(self.text) // 2
        yield StreamChunk(self.text[:half], [0], [PLAIN])
        while self.gate.exists():
            time.sleep(0.005)
        yield StreamChunk(self.text[half:], [1], [PLAIN], self._output())
