"""The public class: load a model once, generate with it."""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Unpack, cast, overload

from paceline.config import Quant
from paceline.engine.batch import RequestMaker
from paceline.engine.engine import Engine, EngineStats
from paceline.engine.inputs import (
    ChatOptions,
    Messages,
    Params,
    Prompt,
    RequestOptions,
    as_prompts,
    one_of,
    params_of_each,
    split_chat_options,
)
from paceline.engine.open import OpenedEngine, open_engine, settings_of
from paceline.errors import ConfigError, RequestError
from paceline.outputs import RequestOutput, StreamChunk
from paceline.runtimes.base import Network
from paceline.sampling.params import SAMPLING_NAMES
from paceline.speculation.draft_length.explain import explain_policy, explain_steps
from paceline.speculation.drafter import Drafter, DrafterNeeds
from paceline.speculation.request import Request
from paceline.spelling import suggest_arguments
from paceline.tokenizer.tokenizer import Tokenizer


class LLM:
    """A loaded target, its drafter and their caches. Several threads may call it: their requests run together.

    Example:
        >>> with LLM("mini") as llm:
        ...     print(llm.generate("The quick brown", SamplingParams(max_tokens=8))[0].text)

    Args:
        model: "mini", a model directory, a GGUF file, or a Hugging Face id.
        gguf_file: name of the GGUF file to take from the directory or from the Hub's model; None = the only one.
        gguf_weights: "exact" (the values of the file) or "regroup" (quantise them again so that they run faster).
        numerics: "exact": a token depends on nothing but target, prompt, sampling parameters and seed; "fast": any kernel.
        dtype: "auto" (as stored), "bf16", "f16" or "f32"; only "f32" leaves rows unrounded in front of quantised matrices.
        quantization: quantise the weights while loading: "none", "int8", "int4" or `QuantOptions`; the result is cached on disk.
        threads: CPU threads; None = the processors this process may use. More are not used.
        oversubscribe: use so many threads even where there are fewer processors.
        max_model_len: longest prompt + output.
        kv_cache_dtype: type of keys and values in the cache: "f32", "bf16", "f16" or "int8"; "auto" = that of computation, f16 for
            quantised GGUF files.
        kv_cache_gb: memory for keys and values at most, taken as it is used.
        device: "auto", "cpu" or "cuda".
        backend: "native" (our own CPU kernels) or "torch"; "auto" = the faster one for this machine.
        drafter: "auto" (ngram, and what comes with the model), "none", "ngram", "suffix", "prediction", "draft_model", "medusa" or
            "mtp" of the model's own directory, the directory or id of a draft model or of heads, or several of them together.
        num_draft_tokens: tokens guessed per step at most, or "auto" (16): how many is decided step by step, by what pays.
        tree_width: guesses per position, of draft models and heads; 1 = a chain, or what Medusa heads make of its rows.
        draft_quantization: as `quantization`, for draft models and heads; "auto": as `SpeculationConfig` says, 8 bits or 4.
        draft_adapter: directory of a LoRA adapter that the draft model computes with; it changes the speed alone.
        drafter_options: settings of single methods: {"tree": "accuracy"} (medusa), {"boundaries": (2, 16, 29)} (eagle3) and others, which
            docs/methods lists.
        acceptance: which guesses are kept: "match" (a seed gives one text, whatever drafts) or "rejection" (sampled texts have the same
            distribution but depend on what was drafted).
        max_num_seqs: requests that run at a time; others wait their turn.
        max_num_batched_tokens: rows of one pass, known tokens and drafts of all requests.
        prefill_chunk_size: prompt rows of a pass, of all requests together; fewer make the gaps between tokens of other requests shorter.
        enable_prefix_caching: whether rows of earlier requests are kept while there is room, for those that begin with the same tokens.
        checkpoint_interval: rows between the stored states of recurrent layers, a multiple of 32; a text also has one after
            the last 32 rows it filled.
        adapters: directories of LoRA adapters by name; requests ask for one by `adapter=name`.
        merge_adapter: directory of a LoRA adapter that is added to the weights before they are rounded or quantised. That is another
            target: its tokens may differ from those of the same adapter asked for by name.
        revision, hf_token, offline: for models from the Hugging Face Hub.

    Raises:
        ConfigError, CheckpointError, CapacityError, IncompatibleDrafterError, BackendUnavailableError: with the way out.
    """

    @suggest_arguments("LLM", of_sampling=SAMPLING_NAMES)
    def __init__(
        self,
        model: str = "mini",
        *,
        gguf_file: str | None = None,
        gguf_weights: str = "exact",
        numerics: str = "exact",
        dtype: str = "auto",
        quantization: Quant = "none",
        threads: int | None = None,
        oversubscribe: bool = False,
        max_model_len: int | None = None,
        kv_cache_dtype: str = "auto",
        kv_cache_gb: float | None = None,
        device: str = "auto",
        backend: str = "auto",
        drafter: str | Sequence[str] | Drafter | Sequence[Drafter] = "auto",
        num_draft_tokens: int | str = "auto",
        tree_width: int = 1,
        draft_quantization: Quant = "auto",
        draft_adapter: str | Path | None = None,
        drafter_options: Mapping[str, object] | None = None,
        acceptance: str = "match",
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        prefill_chunk_size: int = 256,
        enable_prefix_caching: bool = True,
        checkpoint_interval: int = 512,
        adapters: Mapping[str, str | Path] | None = None,
        merge_adapter: str | Path | None = None,
        revision: str | None = None,
        hf_token: str | None = None,
        offline: bool = False,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "model")}
        config, self._speculation, self._given_drafters = settings_of(model, options)
        self._loaded: OpenedEngine | None = open_engine(config, self._speculation, self._given_drafters)

    def __enter__(self) -> "LLM":
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free weights and caches. Later calls raise, and so does the next step of an open stream; closing again does nothing."""
        self._loaded = None
        gc.collect()  # an engine and its scheduler refer to each other

    @property
    def engine(self) -> Engine:
        return self._opened.engine

    @property
    def notices(self) -> Sequence[str]:
        """What loading had to say, a line each."""
        return self._opened.notices

    @property
    def _opened(self) -> OpenedEngine:
        return self._check_open()

    @property
    def _maker(self) -> RequestMaker:
        return self._opened.maker

    @property
    def runtime(self) -> Network:
        """The target."""
        return self.engine.runtime

    @property
    def tokenizer(self) -> Tokenizer:
        return self._maker.tokenizer

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, the first one of several; None for plain decoding."""
        return next(iter(self.engine.speculator.drafters), None)

    @property
    def vocab_size(self) -> int:
        """Ids that can be drawn or stand in a prompt."""
        return self._maker.vocab_size

    @property
    def max_model_len(self) -> int:
        """Prompt + output at most, in tokens."""
        return self._maker.max_model_len

    @property
    def numerics(self) -> str:
        """The numerics in effect: "exact" or "fast"."""
        return self._opened.numerics

    @property
    def drafter_name(self) -> str:
        return self._opened.drafter_name

    @property
    def banner(self) -> str:
        """One line on what speculation will do."""
        return self._opened.banner

    def explain(self, output: RequestOutput) -> list[str]:
        """Lines on how much was drafted for an output and why; of its steps if they were asked for (`speculation={"trees": True}`)."""
        steps = explain_steps(output.steps) if output.steps is not None else []
        return steps if self.drafter is None else [*steps, *explain_policy(self.engine.speculator.policy)]

    def stats(self) -> EngineStats:
        """Counters of all requests so far."""
        return self.engine.stats

    @suggest_arguments("generate", of_sampling=SAMPLING_NAMES)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Complete prompts as they are.

        Args:
            prompts: a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these; several run as one
                ragged batch.
            params: for all of them, or a list with one for each; by default greedy, 256 tokens.
            sampling_params: another name of `params`.
            options: see `RequestOptions`.

        Returns:
            one output per prompt, in order; with `params.n` > 1, n per prompt.

        Raises:
            RequestError: a prompt or parameter cannot be served, or a request failed while running (its grammar, its processors); the
                others are aborted.
            CapacityError: a request alone is larger than the cache; nothing ran.
        """
        ids = [self._maker.prompt_ids(prompt) for prompt in as_prompts(prompts)]
        return self._run(ids, one_of(params, sampling_params), options)

    @overload
    def chat(
        self, messages: Messages, params: Params = None, *, sampling_params: Params = None, **options: Unpack[ChatOptions]
    ) -> RequestOutput: ...

    @overload
    def chat(
        self, messages: Sequence[Messages], params: Params = None, *, sampling_params: Params = None, **options: Unpack[ChatOptions]
    ) -> list[RequestOutput]: ...

    @suggest_arguments("chat", of_sampling=SAMPLING_NAMES)
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        sampling_params: Params = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation, or several.

        Args:
            messages: one conversation as a list of {"role", "content"}, or a list of conversations. A content is a text or a list of
                parts {"type": "text", "text": text}, which are joined by line ends.
            params, sampling_params: as for `generate`.
            options: see `ChatOptions`.

        Returns:
            one output for one conversation, a list for a list; `content`, `reasoning` and `tool_calls` are what its text consists of.

        Raises:
            RequestError: as for `generate`; or several samples of one conversation are asked for that is not in a list.
        """
        given: object = messages
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise RequestError(
                f"messages is {given!r}: give a list of {{'role', 'content'}}, or a list of such lists", parameter="messages"
            )
        is_one = isinstance(messages[0], Mapping)
        conversations = [cast(Messages, messages)] if is_one else cast(Sequence[Messages], messages)
        each = params_of_each(one_of(params, sampling_params), len(conversations))
        if is_one and each[0].n > 1:
            raise RequestError(f"n is {each[0].n} and one conversation has one answer: give a list, [messages]", parameter="n")
        chats = [self._maker.chat(conversation, options) for conversation in conversations]
        outputs = self._run([ids for ids, _, _ in chats], each, chats[0][2])
        parsers = [parser for (_, parser, _), params in zip(chats, each, strict=True) for _ in range(params.n)]
        outputs = [parser.parsed(output) for parser, output in zip(parsers, outputs, strict=True)]
        return outputs[0] if is_one else outputs

    @suggest_arguments("stream", of_sampling=SAMPLING_NAMES)
    def stream(
        self, prompt: Prompt, params: Params = None, *, sampling_params: Params = None, **options: Unpack[RequestOptions]
    ) -> Iterator[StreamChunk]:
        """Complete one prompt and yield each new chunk; the last chunk of each sample has its whole output.

        Other calls may be made in between; this one advances with them.
        """
        return self._stream(self._maker.prompt_ids(prompt), one_of(params, sampling_params), options)

    @suggest_arguments("stream_chat", of_sampling=SAMPLING_NAMES)
    def stream_chat(
        self, messages: Messages, params: Params = None, *, sampling_params: Params = None, **options: Unpack[ChatOptions]
    ) -> Iterator[StreamChunk]:
        """Answer one conversation and yield each new chunk of the answer."""
        prompt, request = split_chat_options(options)
        return self._stream(self._maker.chat_ids(messages, **prompt), one_of(params, sampling_params), request)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may ask for."""
        return self.engine.adapters.names

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter beside those that are there; requests ask for it by `adapter=name`. Others may run meanwhile.

        Args:
            directory: with the adapter_config.json and the safetensors file that PEFT writes.

        Raises:
            CapacityError: it does not fit in memory.
            CheckpointError: the files cannot be used, or are another model's.
            ConfigError: an adapter has this name already, or it changes what cannot be changed here.
            BackendUnavailableError: the target's runtime runs no adapters.
        """
        self._opened.load_adapter(name, directory)

    def unload_adapter(self, name: str) -> None:
        """Refuse requests for an adapter from now on; running ones end with it.

        Raises:
            ConfigError: there is none of this name.
        """
        self.engine.remove_adapter(name)

    def requantize(self, quantization: Quant) -> None:
        """Quantise the target in another way, or not at all with "none"; the drafter stays, unless it reads the target's hidden states.

        The new target is built beside the old one, so both need memory for a moment; then it replaces the old one. If anything fails,
        nothing changes.

        Raises:
            ConfigError: `quantization` is unknown, or a request is still running.
            CheckpointError, CapacityError: the new target cannot be built.
        """
        self._check_idle()
        drafters = list(self.engine.speculator.drafters)
        needs = DrafterNeeds.of(drafters)
        if needs.hidden_states or needs.layers:  # their caches belong to the old target
            drafters = list(self._given_drafters)
        without = replace(self._opened.config, quantization=quantization, adapters={})
        opened = open_engine(without, self._speculation, drafters, with_mixtures=self.engine.runtime.supports_mixtures)
        for adapter in self.engine.adapters.all:
            opened.engine.add_adapter(adapter)
        with self.engine.between_steps():
            self._check_idle()
            self._loaded = opened

    def _check_open(self) -> OpenedEngine:
        if self._loaded is None:
            raise ConfigError("this LLM is closed: open another one")
        return self._loaded

    @contextmanager
    def _in_use(self) -> Iterator[OpenedEngine]:
        """The engine, which is not replaced meanwhile."""
        with ExitStack() as stack:
            while True:
                opened = self._check_open()
                with opened.engine.between_steps():  # it cannot be replaced now
                    if opened is self._loaded:
                        stack.enter_context(opened.engine.held())
                        break
            yield opened

    def _check_idle(self) -> None:
        if not self.engine.is_idle:
            raise ConfigError("the target cannot be requantized while a request is running: finish its stream or close it first")

    def _run(self, prompts: Sequence[list[int]], params: Params, options: RequestOptions) -> list[RequestOutput]:
        with self._in_use() as opened:
            requests = opened.requests(prompts, params, options, is_streamed=False)
            with closing(opened.engine.run(requests)) as steps:  # closed at once if we are interrupted between two steps
                for _ in steps:
                    pass
            return [opened.output(request) for request in requests]

    def _stream(self, prompt: list[int], params: Params, options: RequestOptions) -> Iterator[StreamChunk]:
        with self._in_use() as opened:
            num_seen = dict.fromkeys(opened.requests([prompt], params, options, is_streamed=True), 0)
            with closing(opened.engine.run(list(num_seen))) as steps:
                while num_seen:
                    self._check_open()
                    if not _has_news(num_seen):  # another thread's steps may have brought some
                        next(steps, None)
                    with opened.engine.between_steps():
                        _raise_error(num_seen)  # another thread's step may have met it
                        chunks = [opened.chunk(request, seen) for request, seen in num_seen.items()]
                        num_seen = {request: request.num_output_tokens for request in num_seen if not request.is_finished}
                    yield from chunks  # the caller may run steps of its own in between


def _raise_error(requests: Iterable[Request]) -> None:
    for request in requests:
        if request.error is not None:
            raise request.error


def _has_news(num_seen: Mapping[Request, int]) -> bool:
    """Whether any of these requests has more output than in `num_seen`, or ended; False if one failed, so that the engine reports it."""
    if any(request.error is not None for request in num_seen):
        return False
    return any(request.is_finished or request.num_output_tokens > seen for request, seen in num_seen.items())
