"""The public class: load a model once, generate with it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, cast, overload

from paceline.config import EngineConfig, Quant, SpeculationConfig
from paceline.engine.batch import RequestMaker
from paceline.engine.engine import Engine
from paceline.engine.open import open_engine
from paceline.errors import ConfigError, RequestError
from paceline.outputs import RequestOutput, StreamChunk
from paceline.runtimes.base import Runtime
from paceline.sampling.params import SamplingParams
from paceline.speculation.drafter import Drafter
from paceline.speculation.request import DraftHints, Request
from paceline.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Predictions = Prompt | Sequence[Prompt | None] | None
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded target, its drafter and their caches. One caller at a time.

    Example:
        >>> llm = LLM("mini")
        >>> llm.generate("The quick brown", SamplingParams(max_tokens=8))[0].text

    Args:
        model: "mini", a model directory, a GGUF file, or a Hugging Face id.
        gguf_file: name of the GGUF file to take from the directory or from the Hub's model; None = the only one.
        gguf_weights: "exact" (the values of the file) or "regroup" (quantise them again so that they run faster).
        numerics: "exact": a token depends on nothing but target, prompt, sampling parameters and seed; "fast": any kernel.
        dtype: "auto" (as stored), "bf16", "f16" or "f32".
        quant: quantise the weights while loading: "none", "int8", "int4" or `QuantOptions`; the result is cached on disk.
        threads: CPU threads; None = the processors this process may use.
        max_context: longest prompt + output.
        cache_gb: memory for keys and values.
        device: "auto", "cpu" or "cuda".
        backend: "native" (our own CPU kernels), "openvino" or "torch"; "auto" = the fastest for this machine and these weights.
        drafter: "auto" (the model's own draft model, else ngram), "none", "ngram", "suffix", "prediction", a draft model's
            directory or id, or several of them together.
        num_draft_tokens: tokens guessed a step, or "auto" (4).
        tree_width: guesses a position of a draft model; 1 = a chain.
        draft_quant: the same for draft models.
        revision, token, offline: for models from the Hugging Face Hub.

    Raises:
        ConfigError, CheckpointError, CapacityError, IncompatibleDrafterError, BackendUnavailableError: with the way out.
    """

    def __init__(
        self,
        model: str = "mini",
        *,
        gguf_file: str | None = None,
        gguf_weights: str = "exact",
        numerics: str = "exact",
        dtype: str = "auto",
        quant: Quant = "none",
        threads: int | None = None,
        max_context: int | None = None,
        cache_gb: float | None = None,
        device: str = "auto",
        backend: str = "auto",
        drafter: str | Sequence[str] | Drafter = "auto",
        num_draft_tokens: int | str = "auto",
        tree_width: int = 1,
        draft_quant: Quant = "none",
        max_num_seqs: int = 16,
        revision: str | None = None,
        token: str | None = None,
        offline: bool = False,
    ) -> None:
        config = EngineConfig(
            model=str(model),
            gguf_file=gguf_file,
            gguf_weights=gguf_weights,
            numerics=numerics,
            dtype=dtype,
            quant=quant,
            threads=threads,
            max_context=max_context,
            cache_gb=cache_gb,
            device=device,
            backend=backend,
            max_num_seqs=max_num_seqs,
            revision=revision,
            token=token,
            offline=offline,
        )
        names = drafter.name if isinstance(drafter, Drafter) else _as_setting(drafter)
        self._speculation = SpeculationConfig(
            drafter=names, num_draft_tokens=num_draft_tokens, tree_width=tree_width, draft_quant=draft_quant
        )
        self._opened = open_engine(config, self._speculation, drafter if isinstance(drafter, Drafter) else None)

    @property
    def engine(self) -> Engine:
        return self._opened.engine

    @property
    def notices(self) -> Sequence[str]:
        """What loading had to say, a line each."""
        return self._opened.notices

    @property
    def _maker(self) -> RequestMaker:
        return self._opened.maker

    @property
    def runtime(self) -> Runtime:
        """The target."""
        return self.engine.runtime

    @property
    def tokenizer(self) -> Tokenizer:
        return self._maker.tokenizer

    @property
    def drafter(self) -> Drafter | None:
        return self.engine.guesser.drafter

    @property
    def vocab_size(self) -> int:
        """Ids that can be drawn or stand in a prompt."""
        return self._maker.vocab_size

    @property
    def max_context(self) -> int:
        """Prompt + output at most, in tokens."""
        return self._maker.max_context

    @property
    def numerics(self) -> str:
        """What holds here: "exact" or "fast"."""
        return self.runtime.capabilities.numerics.value

    @property
    def drafter_name(self) -> str:
        return "none" if self.drafter is None else self.drafter.name

    @property
    def banner(self) -> str:
        """One line on what speculation will do."""
        if self.drafter is None:
            return "speculation: off"
        policy = self.engine.guesser.policy
        text = f"speculation: on, drafter {self.drafter.describe()}, up to {policy.num_draft_tokens} draft tokens a step"
        if policy.costs is not None:
            text += f"; pays from {max(0.0, policy.costs.break_even_accepted()):.2f} accepted tokens a step on"
        return text

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        prediction: Predictions = None,
        namespace: str | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts as they are.

        Args:
            prompts: a string, a list of token ids, or a list of these; several run as one ragged batch.
            params: for all of them; by default greedy, 256 tokens.
            prediction: text or token ids the outputs will resemble; a list has one, or None, for each prompt. Needs the drafter
                "prediction". Changes the speed, never a token.
            namespace: whose finished outputs a suffix store may offer as guesses and remember these in; None = nobody's.

        Returns:
            one output a prompt, in order.

        Raises:
            RequestError: a prompt or parameter cannot be served; nothing ran.
        """
        ids = [self._maker.prompt_ids(prompt) for prompt in _as_list(prompts)]
        return self._run(ids, params, self._hints(prediction, namespace, len(ids)))

    @overload
    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, prediction: Predictions = None, namespace: str | None = None
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | None = None,
        *,
        prediction: Predictions = None,
        namespace: str | None = None,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        *,
        prediction: Predictions = None,
        namespace: str | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation, or several.

        Args:
            messages: one conversation as a list of {"role", "content"}, or a list of conversations.
            prediction, namespace: as for `generate`.

        Returns:
            one output for one conversation, a list for a list.
        """
        given: object = messages
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise RequestError(
                f"messages is {given!r}: give a list of {{'role', 'content'}}, or a list of such lists", parameter="messages"
            )
        is_one = isinstance(messages[0], Mapping)
        conversations = [cast(Messages, messages)] if is_one else cast(Sequence[Messages], messages)
        hints = self._hints(prediction, namespace, len(conversations))
        outputs = self._run([self._chat_ids(conversation) for conversation in conversations], params, hints)
        return outputs[0] if is_one else outputs

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, prediction: Prompt | None = None, namespace: str | None = None
    ) -> Iterator[StreamChunk]:
        """Complete one prompt, yielding what every step adds; the last chunk carries the whole output."""
        return self._stream(self._maker.prompt_ids(prompt), params, self._hints(prediction, namespace, 1))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, *, prediction: Prompt | None = None, namespace: str | None = None
    ) -> Iterator[StreamChunk]:
        """Answer one conversation, yielding what every step adds."""
        return self._stream(self._chat_ids(messages), params, self._hints(prediction, namespace, 1))

    def requantize(self, quant: Quant) -> None:
        """Go on with the target quantised in another way, or as stored with "none"; the drafter stays.

        The new target is built beside the old one, so both need memory for a moment; then they change places at once. If anything
        fails the old one goes on as if nothing had been asked.

        Raises:
            ConfigError: `quant` is unknown, or a request is still running.
            CheckpointError, CapacityError: the new target cannot be built.
        """
        self._check_idle()
        opened = open_engine(replace(self._opened.config, quant=quant), self._speculation, self.drafter)
        self._check_idle()
        self._opened = opened

    def _check_idle(self) -> None:
        if not self.engine.is_idle:
            raise ConfigError("the target cannot be requantized while a request is running: finish its stream or close it first")

    def _run(self, prompts: Sequence[list[int]], params: SamplingParams | None, hints: Sequence[DraftHints]) -> list[RequestOutput]:
        requests = self._requests(prompts, params, hints, is_streamed=False)
        with closing(self.engine.run(requests)) as steps:  # closed at once if we are interrupted between two steps
            for _ in steps:
                pass
        return [self._output(request) for request in requests]

    def _stream(self, prompt: list[int], params: SamplingParams | None, hints: Sequence[DraftHints]) -> Iterator[StreamChunk]:
        (request,) = self._requests([prompt], params, hints, is_streamed=True)
        seen = request.num_prompt_tokens
        with closing(self.engine.run([request])) as steps:
            for _ in steps:
                output = self._output(request) if request.is_finished else None
                text = request.text_stop.take_new() if request.text_stop is not None else ""
                yield StreamChunk(text, request.token_ids[seen:], request.origins[seen - request.num_prompt_tokens :], output)
                seen = len(request.token_ids)

    def _requests(
        self, prompts: Sequence[list[int]], params: SamplingParams | None, hints: Sequence[DraftHints], *, is_streamed: bool
    ) -> list[Request]:
        made: list[Request] = []
        cache = self.engine.cache
        try:
            for prompt, hint in zip(prompts, hints, strict=True):
                made.append(self._maker.make(prompt, params or SamplingParams(), cache, is_streamed=is_streamed, hints=hint))
        except Exception:
            for request in made:
                cache.release(request.sequence)
            raise
        return made

    def _hints(self, prediction: Predictions, namespace: str | None, num_prompts: int) -> list[DraftHints]:
        reads = self.drafter is not None and self.drafter.reads_predictions
        return self._maker.hints(prediction, namespace, num_prompts, are_predictions_read=reads)

    def _output(self, request: Request) -> RequestOutput:
        return self._maker.output(request, numerics=self.numerics, drafter=self.drafter_name)

    def _chat_ids(self, messages: Messages) -> list[int]:
        return self._maker.prompt_ids(self.tokenizer.apply_chat_template(messages))


def _as_setting(names: Any) -> Any:
    """Drafter names as `SpeculationConfig` keeps and checks them: one as it is, several as a tuple."""
    return tuple(names) if isinstance(names, list) else names


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt is a string or a list of ids; anything else is a list of prompts."""
    if isinstance(prompts, str) or not hasattr(prompts, "__len__") or (len(prompts) > 0 and not hasattr(prompts[0], "__len__")):
        return [cast(Prompt, prompts)]
    if len(prompts) == 0:
        raise RequestError("there is no prompt: give a string, a list of token ids, or a list of these", parameter="prompt")
    return cast(Sequence[Prompt], prompts)
