"""The public class: load a model once, generate with it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, overload

from paceline.config import EngineConfig, SpeculationConfig, cache_directory
from paceline.drafters import TargetDescription, make_drafter
from paceline.engine.batch import RequestMaker
from paceline.engine.engine import Engine
from paceline.engine.memory import plan_cache
from paceline.errors import RequestError
from paceline.hub import resolve
from paceline.kv_cache.paged import KVCache
from paceline.models.config import WeightType
from paceline.outputs import RequestOutput, StreamChunk
from paceline.runtimes.base import Numerics, Runtime
from paceline.runtimes.cost import time_passes
from paceline.runtimes.load import RuntimeOptions, load_runtime
from paceline.sampling.params import SamplingParams
from paceline.speculation.draft_length import DraftLengthPolicy, StepCosts
from paceline.speculation.drafter import Drafter
from paceline.speculation.guess import Guesser
from paceline.speculation.request import Request
from paceline.tokenizer import Tokenizer

DEFAULT_DRAFT_TOKENS = 4

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded target, its drafter and their caches. One caller at a time.

    Example:
        >>> llm = LLM("mini")
        >>> llm.generate("The quick brown", SamplingParams(max_tokens=8))[0].text

    Args:
        model: "mini", a model directory, or a Hugging Face id.
        numerics: "exact": a token depends on nothing but target, prompt, sampling parameters and seed; "fast": any kernel.
        dtype: "auto" (as stored), "bf16", "f16" or "f32".
        threads: CPU threads; None = the processors this process may use.
        max_context: longest prompt + output.
        cache_gb: memory for keys and values.
        device: "auto", "cpu" or "cuda".
        drafter: "auto" (the model's own draft model, else ngram), "none", "ngram", a draft model's directory or id, or several in order.
        num_draft_tokens: tokens guessed a step, or "auto" (4).
        tree_width: guesses a position of a draft model; 1 = a chain.
        revision, token, offline: for models from the Hugging Face Hub.

    Raises:
        ConfigError, CheckpointError, CapacityError, IncompatibleDrafterError, BackendUnavailableError: with the way out.
    """

    def __init__(
        self,
        model: str = "mini",
        *,
        numerics: str = "exact",
        dtype: str = "auto",
        threads: int | None = None,
        max_context: int | None = None,
        cache_gb: float | None = None,
        device: str = "auto",
        drafter: str | Sequence[str] | Drafter = "auto",
        num_draft_tokens: int | str = "auto",
        tree_width: int = 1,
        max_num_seqs: int = 16,
        revision: str | None = None,
        token: str | None = None,
        offline: bool = False,
    ) -> None:
        self.config = EngineConfig(
            model=str(model),
            numerics=numerics,
            dtype=dtype,
            threads=threads,
            max_context=max_context,
            cache_gb=cache_gb,
            device=device,
            max_num_seqs=max_num_seqs,
            revision=revision,
            token=token,
            offline=offline,
        )
        wanted = drafter if isinstance(drafter, Drafter) else drafter_names(drafter)
        self.speculation = SpeculationConfig(
            drafter=wanted if isinstance(wanted, str) else "custom" if isinstance(wanted, Drafter) else ",".join(wanted),
            num_draft_tokens=num_draft_tokens,
            tree_width=tree_width,
        )
        directory = resolve(model, revision=revision, token=token, offline=offline)
        self.tokenizer = Tokenizer.open(directory)
        loaded = load_runtime(directory, self._runtime_options())
        self.runtime: Runtime = loaded.runtime
        plan = plan_cache(self.runtime.config, self.config, self.runtime.capabilities.weight_type)
        self.max_context = plan.max_context
        self.notices = [*loaded.notices, *([plan.notice] if plan.notice else [])]
        cache = self.runtime.new_cache(plan.num_blocks)
        self.vocab_size = min(self.runtime.config.vocab_size, self.tokenizer.vocab_size)
        target = TargetDescription(
            directory=directory,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_context=plan.max_context,
            max_slots=cache.max_slots,
            num_threads=self.config.num_threads,
            device=device,
            tree_width=tree_width,
            offline=offline,
            token=token,
        )
        self.drafter = wanted if isinstance(wanted, Drafter) else make_drafter(wanted, target)
        policy = self._policy(cache)
        guesser = Guesser(self.drafter, policy, vocab_size=self.vocab_size, layout=cache.layout)
        self.engine = Engine(self.runtime, cache, guesser, max_num_seqs=self.config.max_num_seqs, chunk_rows=self.config.chunk_rows)
        self._maker = RequestMaker(self.tokenizer, self.vocab_size, self.max_context, self.runtime.config.eos_token_ids)

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
            text += f"; pays from {policy.costs.break_even_accepted():.2f} accepted tokens a step on"
        return text

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[RequestOutput]:
        """Complete prompts as they are.

        Args:
            prompts: a string, a list of token ids, or a list of these; several run as one ragged batch.
            params: for all of them; by default greedy, 256 tokens.

        Returns:
            one output a prompt, in order.

        Raises:
            RequestError: a prompt or parameter cannot be served; nothing ran.
        """
        return self._run([self._maker.prompt_ids(prompt) for prompt in _as_list(prompts)], params)

    @overload
    def chat(self, messages: Messages, params: SamplingParams | None = None) -> RequestOutput: ...

    @overload
    def chat(self, messages: Sequence[Messages], params: SamplingParams | None = None) -> list[RequestOutput]: ...

    def chat(self, messages: Messages | Sequence[Messages], params: SamplingParams | None = None) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation, or several.

        Args:
            messages: one conversation as a list of {"role", "content"}, or a list of conversations.

        Returns:
            one output for one conversation, a list for a list.
        """
        if messages and isinstance(messages[0], Mapping):
            return self._run([self._chat_ids(cast(Messages, messages))], params)[0]
        return self._run([self._chat_ids(conversation) for conversation in cast(Sequence[Messages], messages)], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Complete one prompt, yielding what every step adds; the last chunk carries the whole output."""
        return self._stream(self._maker.prompt_ids(prompt), params)

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Answer one conversation, yielding what every step adds."""
        return self._stream(self._chat_ids(messages), params)

    def _run(self, prompts: Sequence[list[int]], params: SamplingParams | None) -> list[RequestOutput]:
        requests = self._requests(prompts, params, is_streamed=False)
        for _ in self.engine.run(requests):
            pass
        return [self._output(request) for request in requests]

    def _stream(self, prompt: list[int], params: SamplingParams | None) -> Iterator[StreamChunk]:
        (request,) = self._requests([prompt], params, is_streamed=True)
        seen = request.num_prompt_tokens
        for _ in self.engine.run([request]):
            output = self._output(request) if request.is_finished else None
            text = request.text_stop.take_new() if request.text_stop is not None else ""
            yield StreamChunk(text, request.token_ids[seen:], request.origins[seen - request.num_prompt_tokens :], output)
            seen = len(request.token_ids)

    def _requests(self, prompts: Sequence[list[int]], params: SamplingParams | None, *, is_streamed: bool) -> list[Request]:
        made: list[Request] = []
        cache = self.engine.cache
        try:
            for prompt in prompts:
                made.append(self._maker.make(prompt, params or SamplingParams(), cache, is_streamed=is_streamed))
        except Exception:
            for request in made:
                cache.release(request.sequence)
            raise
        return made

    def _output(self, request: Request) -> RequestOutput:
        return self._maker.output(request, numerics=self.numerics, drafter=self.drafter_name)

    def _chat_ids(self, messages: Messages) -> list[int]:
        return self._maker.prompt_ids(self.tokenizer.apply_chat_template(messages))

    def _runtime_options(self) -> RuntimeOptions:
        config = self.config
        return RuntimeOptions(
            numerics=Numerics(config.numerics),
            dtype=None if config.dtype == "auto" else WeightType(config.dtype),
            num_threads=config.num_threads,
            max_context=config.max_context,
            device=config.device,
            collect_layers=(),
            facts_directory=cache_directory(),
        )

    def _policy(self, cache: KVCache) -> DraftLengthPolicy:
        """A fixed draft length; the guard's costs are timed here, on the machine that will run."""
        wanted = self.speculation.num_draft_tokens
        count = wanted if isinstance(wanted, int) else DEFAULT_DRAFT_TOKENS
        if self.drafter is None:
            return DraftLengthPolicy(count)
        rows = 1 + count * self.speculation.tree_width
        times = time_passes(self.runtime, cache, (1, rows))
        self.runtime.num_passes = 0
        return DraftLengthPolicy(
            count, row_budget=rows if self.speculation.tree_width > 1 else None, costs=StepCosts(times[1], times[rows])
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt is a string or a list of ids; anything else is a list of prompts."""
    if isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], str | Sequence)):
        return [cast(Prompt, prompts)]
    if not prompts:
        raise RequestError("there is no prompt: give a string, a list of token ids, or a list of these", parameter="prompt")
    return cast(Sequence[Prompt], prompts)


def drafter_names(drafter: str | Sequence[str]) -> str | Sequence[str]:
    """One name as it is; a list of one as that one."""
    if isinstance(drafter, str):
        return drafter
    return drafter[0] if len(drafter) == 1 else list(drafter)
