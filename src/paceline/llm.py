"""The public class: load a model once, generate with it."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Unpack, cast, overload

from paceline.config import Quant
from paceline.engine.engine import Engine, EngineStats, raise_error
from paceline.engine.input_processor import InputProcessor
from paceline.engine.inputs import ChatOptions, Messages, Params, Prompt, RequestOptions, as_prompts, params_of_each, split_chat_options
from paceline.engine.loader import LoadedEngine, load_engine, parse_settings
from paceline.engine.request import EngineRequest
from paceline.errors import ConfigError, RequestError
from paceline.outputs import RequestOutput, StreamChunk
from paceline.runtimes.base import Network
from paceline.sampling.params import SAMPLING_NAMES
from paceline.speculation.draft_length.explain import explain_policy, explain_steps
from paceline.speculation.drafter import Drafter, DrafterNeeds
from paceline.spelling import suggest_arguments
from paceline.tokenizer.tokenizer import Tokenizer


class LLM:
    """A loaded target, its drafters and their caches. Several threads may call it: their requests run together.

    Example:
        >>> with LLM("mini") as llm:
        ...     print(llm.generate("The quick brown", SamplingParams(max_tokens=8))[0].text)

    Args:
        model: "mini", a model directory, a GGUF file, or a Hugging Face id.
        gguf_file: name of the GGUF file to take from the directory or from the Hub's model; None = the only one.
        gguf_weights: "exact" (the values of the file) or "regroup" (quantise them again, for speed).
        numerics: "exact": a token depends on target, prompt, sampling parameters and seed only; "fast": any kernel.
        dtype: "auto" (as stored), "bf16", "f16" or "f32"; only "f32" does not round rows before quantised matrices.
        quantization: quantise the weights while loading: "none", "int8", "int4" or `QuantOptions`; the result is cached on disk.
        threads: CPU threads, at most as many as processors that this process may use; None = as many.
        oversubscribe: use `threads` threads even if there are fewer processors.
        max_model_len: longest prompt + output.
        kv_cache_dtype: type of keys and values in the cache: "f32", "bf16", "f16" or "int8"; "auto" = that of computation, f16 for
            quantised GGUF files.
        kv_cache_gb: maximum memory for keys and values, allocated as it is used.
        device: "auto", "cpu" or "cuda".
        backend: "native" (our own CPU kernels) or "torch"; "auto" = the faster one on this machine.
        drafter: "auto" (ngram, and what comes with the model), "none", "ngram", "suffix", "prediction", "draft_model", "medusa" or
            "mtp" of the model's own directory, the directory or id of a draft model or of heads, or several of them combined.
        num_speculative_tokens: maximum draft tokens per step, or "auto" (16). The length of each draft is chosen from measured costs.
        tree_width: draft tokens per position, of draft models and heads; 1 = a chain, or the default tree of Medusa heads.
        draft_quantization: as `quantization`, for draft models and heads; "auto": 8 bits or 4 (`SpeculationConfig`).
        draft_adapter: directory of a LoRA adapter for the draft model; it changes the speed only.
        drafter_options: settings of one method: {"tree": "accuracy"} (medusa), {"boundaries": (2, 16, 29)} (eagle3); see
            docs/methods.
        acceptance: rule that accepts draft tokens: "match" (a seed gives one text, with any drafter) or "rejection" (sampled texts have
            the same distribution, but depend on the drafts).
        max_num_seqs: maximum running requests; others wait.
        max_num_batched_tokens: rows of one pass, drafts of all requests included.
        prefill_chunk_size: prompt rows of a pass, of all requests together; fewer reduce the inter-token latency of other requests.
        enable_prefix_caching: whether rows of earlier requests are kept for requests with the same prefix, until they are evicted.
        state_interval: rows between checkpoints of recurrent states, a multiple of 32. A sequence also has one after its last
            full block.
        adapters: directories of LoRA adapters by name; requests select one by `adapter=name`.
        merge_adapter: directory of a LoRA adapter that is added to the weights before they are rounded or quantised. Its tokens may
            differ from those of the same adapter selected by name.
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
        num_speculative_tokens: int | str = "auto",
        tree_width: int = 1,
        draft_quantization: Quant = "auto",
        draft_adapter: str | Path | None = None,
        drafter_options: Mapping[str, object] | None = None,
        acceptance: str = "match",
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        prefill_chunk_size: int = 256,
        enable_prefix_caching: bool = True,
        state_interval: int = 512,
        adapters: Mapping[str, str | Path] | None = None,
        merge_adapter: str | Path | None = None,
        revision: str | None = None,
        hf_token: str | None = None,
        offline: bool = False,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "model")}
        config, self._speculation, self._given_drafters = parse_settings(model, options)
        self._loaded_or_none: LoadedEngine | None = load_engine(config, self._speculation, self._given_drafters)

    def __enter__(self) -> "LLM":
        _ = self._loaded  # raises if it is closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free weights and caches. Later calls raise, and so does the next step of an open stream. May be called again."""
        self._loaded_or_none = None
        gc.collect()  # free the old engine now: it is part of a reference cycle

    @property
    def engine(self) -> Engine:
        return self._loaded.engine

    @property
    def notices(self) -> Sequence[str]:
        """Lines for the user about what was loaded."""
        return self._loaded.notices

    @property
    def _loaded(self) -> LoadedEngine:
        if self._loaded_or_none is None:
            raise ConfigError("this LLM is closed: open another one")
        return self._loaded_or_none

    @property
    def _input_processor(self) -> InputProcessor:
        return self._loaded.input_processor

    @property
    def runtime(self) -> Network:
        """The target."""
        return self.engine.runtime

    @property
    def tokenizer(self) -> Tokenizer:
        return self._input_processor.tokenizer

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, or the first of several; None for plain decoding."""
        return next(iter(self.engine.speculator.drafters), None)

    @property
    def vocab_size(self) -> int:
        """Number of ids that can be sampled or be in a prompt."""
        return self._input_processor.vocab_size

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt and output, in tokens."""
        return self._input_processor.max_model_len

    @property
    def numerics(self) -> str:
        """The numerics in effect: "exact" or "fast"."""
        return self._loaded.numerics

    @property
    def drafter_name(self) -> str:
        return self._loaded.drafter_name

    @property
    def banner(self) -> str:
        """One line on the drafters and the draft length policy."""
        return self._loaded.banner

    def explain(self, output: RequestOutput) -> list[str]:
        """Return lines on how much was drafted for an output and why, and on its steps if it has them (`speculation={"trees": True}`)."""
        steps = explain_steps(output.steps) if output.steps is not None else []
        return steps if self.drafter is None else [*steps, *explain_policy(self.engine.speculator.policy)]

    def stats(self) -> EngineStats:
        """Return the counters of all requests so far."""
        return self.engine.stats

    @suggest_arguments("generate", of_sampling=SAMPLING_NAMES)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Complete prompts without a chat template.

        Args:
            prompts: a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these; several run as one
                ragged batch.
            sampling_params: for all prompts, or a list with one for each; by default greedy, 256 tokens.
            options: see `RequestOptions`.

        Returns:
            one output per prompt, in order; with `sampling_params.n` > 1, n per prompt.

        Raises:
            RequestError: a prompt or parameter cannot be served, or a request failed while running; the others are aborted.
            CapacityError: one request alone is larger than the cache; nothing ran.
        """
        ids = [self._input_processor.prompt_ids(prompt) for prompt in as_prompts(prompts)]
        return self._run(ids, sampling_params, options)

    @overload
    def chat(self, messages: Messages, sampling_params: Params = None, **options: Unpack[ChatOptions]) -> RequestOutput: ...

    @overload
    def chat(self, messages: Sequence[Messages], sampling_params: Params = None, **options: Unpack[ChatOptions]) -> list[RequestOutput]: ...

    @suggest_arguments("chat", of_sampling=SAMPLING_NAMES)
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation, or several.

        Args:
            messages: one conversation as a list of {"role", "content"}, or a list of conversations. A content is a text or a list of
                parts {"type": "text", "text": text}, which are joined by line ends.
            sampling_params: as for `generate`.
            options: see `ChatOptions`.

        Returns:
            one output for one conversation, a list for a list, with `content`, `reasoning` and `tool_calls`.

        Raises:
            RequestError: as for `generate`; or `n` > 1 for a conversation that is not in a list.
        """
        given: object = messages
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise RequestError(
                f"messages is {given!r}: give a list of {{'role', 'content'}}, or a list of such lists", parameter="messages"
            )
        is_one = isinstance(messages[0], Mapping)
        conversations = [cast(Messages, messages)] if is_one else cast(Sequence[Messages], messages)
        each = params_of_each(sampling_params, len(conversations))
        if is_one and each[0].n > 1:
            raise RequestError(f"n is {each[0].n} and one conversation has one answer: give a list, [messages]", parameter="n")
        chats = [self._input_processor.chat(conversation, options) for conversation in conversations]
        outputs = self._run([ids for ids, _, _ in chats], each, chats[0][2])
        parsers = [parser for (_, parser, _), params in zip(chats, each, strict=True) for _ in range(params.n)]
        outputs = [parser.parsed(output) for parser, output in zip(parsers, outputs, strict=True)]
        return outputs[0] if is_one else outputs

    @suggest_arguments("stream", of_sampling=SAMPLING_NAMES)
    def stream(self, prompt: Prompt, sampling_params: Params = None, **options: Unpack[RequestOptions]) -> Iterator[StreamChunk]:
        """Complete one prompt and yield each new chunk; the last chunk of each sample has its whole output.

        Other calls may be made in between, and their steps advance this one.
        """
        return self._stream(self._input_processor.prompt_ids(prompt), sampling_params, options)

    @suggest_arguments("stream_chat", of_sampling=SAMPLING_NAMES)
    def stream_chat(self, messages: Messages, sampling_params: Params = None, **options: Unpack[ChatOptions]) -> Iterator[StreamChunk]:
        """Answer one conversation and yield each new chunk of the answer."""
        prompt, request = split_chat_options(options)
        return self._stream(self._input_processor.chat_ids(messages, **prompt), sampling_params, request)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests can select."""
        return self.engine.adapters.names

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter, which requests select by `adapter=name`. Requests may run meanwhile.

        Args:
            directory: contains the adapter_config.json and the safetensors file that PEFT writes.

        Raises:
            CapacityError: it does not fit in memory.
            CheckpointError: the files cannot be used, or belong to another model.
            ConfigError: an adapter has this name already, or it changes parts that cannot be changed.
            BackendUnavailableError: the target's runtime runs no adapters.
        """
        self._loaded.load_adapter(name, directory)

    def unload_adapter(self, name: str) -> None:
        """Reject requests for an adapter from now on; running ones keep it.

        Raises:
            ConfigError: there is none of this name.
        """
        self.engine.remove_adapter(name)

    def requantize(self, quantization: Quant) -> None:
        """Load the target again with another quantisation; "none" = without. Drafters stay, unless they read the target's hidden states.

        The old target is replaced once the new one is loaded, so both need memory for a moment. If loading fails, nothing changes.

        Raises:
            ConfigError: `quantization` is unknown, or a request is still running.
            CheckpointError, CapacityError: the new target cannot be built.
        """
        self._check_idle()
        drafters = list(self.engine.speculator.drafters)
        needs = DrafterNeeds.union(drafters)
        if needs.hidden_states or needs.layers:  # drafters that read the target's hidden states keep caches of the old target
            drafters = list(self._given_drafters)
        without = replace(self._loaded.config, quantization=quantization, adapters={})
        loaded = load_engine(without, self._speculation, drafters, with_mixtures=self.engine.runtime.supports_xlora)
        for adapter in self.engine.adapters.all:
            loaded.engine.add_adapter(adapter)
        with self.engine.between_steps():
            self._check_idle()
            self._loaded_or_none = loaded

    @contextmanager
    def _in_use(self) -> Iterator[LoadedEngine]:
        """Yield the loaded engine, which `requantize` does not replace meanwhile."""
        with ExitStack() as stack:
            while True:
                loaded = self._loaded
                with loaded.engine.between_steps():  # it cannot be replaced now
                    if loaded is self._loaded_or_none:
                        stack.enter_context(loaded.engine.held())
                        break
            yield loaded

    def _check_idle(self) -> None:
        if not self.engine.is_idle:
            raise ConfigError("the target cannot be requantized while a request is running: finish its stream or close it first")

    def _run(self, prompts: Sequence[list[int]], params: Params, options: RequestOptions) -> list[RequestOutput]:
        with self._in_use() as loaded:
            requests = loaded.requests(prompts, params, options, is_streamed=False)
            with closing(loaded.engine.run(requests)) as steps:  # close the run at once if an interrupt comes between two steps
                for _ in steps:
                    pass
            return [loaded.output(request) for request in requests]

    def _stream(self, prompt: list[int], params: Params, options: RequestOptions) -> Iterator[StreamChunk]:
        with self._in_use() as loaded:
            num_seen = dict.fromkeys(loaded.requests([prompt], params, options, is_streamed=True), 0)
            with closing(loaded.engine.run(list(num_seen))) as steps:
                while num_seen:
                    _ = self._loaded  # raises if it is closed
                    if not _has_updates(num_seen):  # steps of another thread may have added tokens
                        next(steps, None)
                    with loaded.engine.between_steps():
                        raise_error(list(num_seen))  # the error may come from a step of another thread
                        chunks = [loaded.chunk(request, seen) for request, seen in num_seen.items()]
                        num_seen = {request: request.num_output_tokens for request in num_seen if not request.is_finished}
                    yield from chunks  # the caller may run steps of its own between chunks


def _has_updates(num_seen: Mapping[EngineRequest, int]) -> bool:
    """Return whether a request has more tokens than in `num_seen`, or has ended. False if one failed: the next step raises its error."""
    if any(request.error is not None for request in num_seen):
        return False
    return any(request.is_finished or request.num_output_tokens > seen for request, seen in num_seen.items())
