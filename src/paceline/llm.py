"""The public class `LLM`: loads a model and generates text with it."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Unpack, cast, overload

from paceline.config import Quantization
from paceline.engine.engine import Engine, EngineStats, raise_first_error
from paceline.engine.input_processor import InputProcessor
from paceline.engine.inputs import (
    ChatOptions,
    Messages,
    Params,
    Prompt,
    RequestOptions,
    list_prompts,
    params_per_prompt,
    split_chat_options,
)
from paceline.engine.loader import LoadedEngine, load_engine, parse_settings
from paceline.engine.request import EngineRequest
from paceline.errors import ConfigError, RequestError
from paceline.outputs import RequestOutput, StreamChunk
from paceline.runtimes.base import Network
from paceline.sampling.defaults import SamplingDefaults
from paceline.sampling.params import SAMPLING_PARAM_NAMES
from paceline.speculation.draft_length.explain import explain_policy, explain_steps
from paceline.speculation.drafter import Drafter, DrafterNeeds
from paceline.spelling import suggest_arguments, unknown_method
from paceline.tokenizer.tokenizer import Tokenizer


class _AttributeHints(type):
    """Metaclass of `LLM`. If code uses a method of another library, such as `from_pretrained`, the AttributeError suggests our method."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(unknown_method(name), name=name, obj=cls)


class LLM(metaclass=_AttributeHints):
    """A loaded target model, its drafters and their caches. Several threads may call it; their requests are batched together.

    Example:
        >>> with LLM("mini") as llm:
        ...     print(llm.generate("The quick brown", SamplingParams(max_tokens=8))[0].text)

    Args:
        model: "mini", a model directory, a GGUF file, or a Hugging Face id.
        gguf_file: name of the GGUF file, if the directory or the model on the Hub has several.
        gguf_weights: "exact" (the values of the file) or "regroup" (quantise them again in larger groups, for speed).
        numerics: "exact": a token depends only on target, prompt, sampling parameters and seed; "fast": also on the rest of the batch.
        dtype: type of activations: "auto" (as the weights are stored), "bf16", "f16" or "f32". Except with "f32", activations are rounded
            to 8 bits before they are multiplied by a quantised matrix on the CPU.
        quantization: quantise the weights while loading: "none", "int8", "int4" or `QuantOptions`; the result is cached on disk.
        threads: CPU threads, at most the number of processors that this process may use; None = that number, without efficiency cores.
        max_model_len: maximum number of tokens of prompt and output together; None = the model's maximum.
        kv_cache_dtype: type of keys and values: "f32", "bf16", "f16" or "int8" (one scale per row and head); "auto" = `dtype`, f16 for
            quantised GGUF files.
        kv_cache_gb: maximum memory for keys and values, which is allocated when it is first used; None = enough for 4 full contexts and for
            2048 tokens of each of `max_num_seqs` requests, but at most a quarter of the machine's memory and half of its free memory.
        device: "auto", "cpu" or "cuda".
        backend: "native" (our own CPU kernels) or "torch"; "auto" = the faster one on this machine.
        drafter: "auto" ("suffix" and the drafter that comes with the model), "none", "ngram", "suffix", "prediction", "draft_model",
            "medusa" or "mtp" in the model's own directory, the directory or id of a draft model or of heads, or a list of several.
        num_speculative_tokens: maximum draft tokens per step, or "auto" (16). The length of each draft is chosen from measured costs.
        tree_width: candidates per position of draft models and heads; 1 = a chain, or the default tree of Medusa heads.
        draft_quantization: as `quantization`, for draft models and heads. "auto" on the CPU: 4 bits if the target has at most 10 bits
            per value, 8 bits if the target has 16. Heads that copy rows of the target's LM head quantise the copy in the same way.
        draft_adapter: directory of a LoRA adapter for the draft model; it changes the speed only.
        drafter_options: settings of a drafting method, such as {"tree": "accuracy"} for medusa; see docs/methods.
        acceptance: rule that accepts draft tokens: "match" (a seed gives the same text with any drafter) or "rejection" (texts are sampled
            from the same distribution, but also depend on the drafts). At temperature 0 both give the same text.
        speculative_config: vLLM's dictionary {"method", "model", "num_speculative_tokens"}, instead of `drafter` and
            `num_speculative_tokens`.
        max_num_seqs: maximum number of running requests, each with a row in every pass; others wait.
        max_num_batched_tokens: maximum rows of a pass, the drafts of all requests included.
        prefill_chunk_size: maximum prompt rows of a pass, of all requests together. A lower value reduces inter-token latency.
        enable_prefix_caching: whether cached rows of earlier requests are kept for requests with the same prefix.
        state_interval: number of rows between checkpoints of recurrent states, a multiple of 32.
        adapters: directories of LoRA adapters by name; requests select one by `adapter=name`.
        merge_adapter: directory of a LoRA adapter that is merged into the weights before they are rounded or quantised. The output may
            differ from that of the same adapter in `adapters`.
        revision, hf_token, offline: for models from the Hugging Face Hub.

    Raises:
        ConfigError: an argument is unknown or invalid.
        CheckpointError: the model, a drafter or an adapter cannot be read.
        CapacityError, IncompatibleDrafterError, BackendUnavailableError: see `paceline.errors`.
    """

    @suggest_arguments("LLM", sampling_names=SAMPLING_PARAM_NAMES)
    def __init__(
        self,
        model: str = "mini",
        *,
        gguf_file: str | None = None,
        gguf_weights: str = "exact",
        numerics: str = "exact",
        dtype: str = "auto",
        quantization: Quantization = "none",
        threads: int | None = None,
        max_model_len: int | None = None,
        kv_cache_dtype: str = "auto",
        kv_cache_gb: float | None = None,
        device: str = "auto",
        backend: str = "auto",
        drafter: str | Sequence[str] | Drafter | Sequence[Drafter] = "auto",
        num_speculative_tokens: int | str = "auto",
        tree_width: int = 1,
        draft_quantization: Quantization = "auto",
        draft_adapter: str | Path | None = None,
        drafter_options: Mapping[str, object] | None = None,
        acceptance: str = "match",
        speculative_config: Mapping[str, object] | None = None,
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
        config, self._speculation, self._drafter_objects = parse_settings(model, options)
        self._loaded_or_none: LoadedEngine | None = load_engine(config, self._speculation, self._drafter_objects)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError. For a method of another library, the error suggests our method."""
        raise AttributeError(unknown_method(name), name=name, obj=self)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise RequestError, which suggests `generate` and `chat`: models of other libraries are called like functions."""
        raise RequestError("an LLM cannot be called: use llm.generate(prompt, SamplingParams(...)) or llm.chat(messages, ...)")

    def __enter__(self) -> "LLM":
        _ = self._loaded  # raises an error if the LLM is closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free weights and caches. Later calls, unfinished streams and running calls raise an error. A second call does nothing."""
        self._loaded_or_none = None
        gc.collect()  # the engine is part of a reference cycle, so only the garbage collector frees it

    @property
    def engine(self) -> Engine:
        return self._loaded.engine

    @property
    def notices(self) -> Sequence[str]:
        """Messages to the user about the model and the drafters, one line each."""
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
        """The runtime of the target model."""
        return self.engine.runtime

    @property
    def tokenizer(self) -> Tokenizer:
        return self._input_processor.tokenizer

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, or the first of several; None = plain decoding."""
        return next(iter(self.engine.speculator.drafters), None)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that may be in a prompt or be sampled."""
        return self._input_processor.vocab_size

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self._input_processor.max_model_len

    @property
    def numerics(self) -> str:
        """The numerics that the runtime uses: "exact" or "fast"."""
        return self._loaded.numerics

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The sampling parameters that the model recommends. The command line and the server use them as defaults."""
        return self._loaded.sampling_defaults

    @property
    def drafter_name(self) -> str:
        return self._loaded.drafter_name

    @property
    def banner(self) -> str:
        """One line on the drafters and the draft length policy."""
        return self._loaded.banner

    def explain(self, output: RequestOutput) -> list[str]:
        """Return lines that explain the draft lengths of an output, and list the steps recorded by `speculation={"trees": True}`."""
        steps = explain_steps(output.steps) if output.steps is not None else []
        described = [f"drafter: {drafter.traits.description}" for drafter in self.engine.speculator.drafters if drafter.traits.description]
        return [*steps, *explain_policy(self.engine.speculator.policy), *described] if self.engine.speculator.drafters else steps

    def stats(self) -> EngineStats:
        """Return the counters of all requests so far."""
        return self.engine.stats

    @suggest_arguments("generate", sampling_names=SAMPLING_PARAM_NAMES)
    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, **options: Unpack[RequestOptions]
    ) -> list[RequestOutput]:
        """Complete prompts without a chat template.

        Args:
            prompts: a string, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
            sampling_params: one for all prompts, or a list with one for each; by default greedy decoding of up to 256 tokens.
            options: see `RequestOptions`.

        Returns:
            `sampling_params.n` outputs for each prompt, in order.

        Raises:
            RequestError: a prompt or parameter is invalid, or a request failed while running; the others are then aborted.
            CapacityError: a request needs more blocks than the cache has; no request was started.
        """
        ids = [self._input_processor.prompt_ids(prompt) for prompt in list_prompts(prompts)]
        return self._run_requests(ids, sampling_params, options)

    @overload
    def chat(self, messages: Messages, sampling_params: Params = None, **options: Unpack[ChatOptions]) -> RequestOutput: ...

    @overload
    def chat(self, messages: Sequence[Messages], sampling_params: Params = None, **options: Unpack[ChatOptions]) -> list[RequestOutput]: ...

    @suggest_arguments("chat", sampling_names=SAMPLING_PARAM_NAMES)
    def chat(
        self, messages: Messages | Sequence[Messages], sampling_params: Params = None, **options: Unpack[ChatOptions]
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation, or several.

        Args:
            messages: one conversation as a list of {"role", "content"}, or a list of conversations. A content is a string or a list of
                parts {"type": "text", "text": text}, which are joined by newlines.
            sampling_params: as for `generate`.
            options: see `ChatOptions`.

        Returns:
            an output with `content`, `reasoning` and `tool_calls`; for a list of conversations, a list of outputs.

        Raises:
            RequestError: as for `generate`, or `n` > 1 for a conversation that is not in a list.
        """
        unchecked_messages: object = messages
        if not isinstance(unchecked_messages, Sequence) or isinstance(unchecked_messages, str) or not unchecked_messages:
            raise RequestError(
                f"messages is {unchecked_messages!r}: give a list of {{'role', 'content'}}, or a list of such lists", parameter="messages"
            )
        is_single = isinstance(messages[0], Mapping)
        conversations = [cast(Messages, messages)] if is_single else cast(Sequence[Messages], messages)
        params_list = params_per_prompt(sampling_params, len(conversations))
        if is_single and params_list[0].n > 1:
            raise RequestError(f"n is {params_list[0].n} and one conversation has one answer: give a list, [messages]", parameter="n")
        chats = [self._input_processor.prepare_chat(conversation, options) for conversation in conversations]
        outputs = self._run_requests([ids for ids, _, _ in chats], params_list, chats[0][2])
        parsers = [parser for (_, parser, _), params in zip(chats, params_list, strict=True) for _ in range(params.n)]
        outputs = [parser.parse(output) for parser, output in zip(parsers, outputs, strict=True)]
        return outputs[0] if is_single else outputs

    def prompt_token_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            RequestError: as for `generate`, or the prompt is longer than the context.
        """
        return self._input_processor.prompt_ids(prompt)

    def chat_token_ids(self, messages: Messages, **options: Unpack[ChatOptions]) -> list[int]:
        """Return the token ids of a conversation's prompt.

        Raises:
            RequestError: as for `chat`, or the prompt is longer than the context.
        """
        prompt, _ = split_chat_options(options)
        return self._input_processor.chat_token_ids(messages, **prompt)

    @suggest_arguments("stream", sampling_names=SAMPLING_PARAM_NAMES)
    def stream(self, prompt: Prompt, sampling_params: Params = None, **options: Unpack[RequestOptions]) -> Iterator[StreamChunk]:
        """Complete one prompt and yield each new chunk; the last chunk of each sample contains its whole output.

        Other methods may be called before the stream ends; their steps also advance this request.
        """
        return self._stream_request(self._input_processor.prompt_ids(prompt), sampling_params, options)

    @suggest_arguments("stream_chat", sampling_names=SAMPLING_PARAM_NAMES)
    def stream_chat(self, messages: Messages, sampling_params: Params = None, **options: Unpack[ChatOptions]) -> Iterator[StreamChunk]:
        """Answer one conversation and yield each new chunk of the answer."""
        prompt, request = split_chat_options(options)
        return self._stream_request(self._input_processor.chat_token_ids(messages, **prompt), sampling_params, request)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests can select."""
        return self.engine.adapters.names

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter, which requests select by `adapter=name`. Other requests may be running.

        Args:
            directory: contains the adapter_config.json and the safetensors file that PEFT writes.

        Raises:
            CapacityError: the adapter does not fit in memory.
            CheckpointError: the files cannot be read, or the adapter was made for another model.
            ConfigError: an adapter of this name is loaded, or the adapter changes a matrix that we do not support.
            BackendUnavailableError: the target's runtime does not support adapters.
        """
        self._loaded.load_adapter(name, directory)

    def unload_adapter(self, name: str) -> None:
        """Reject new requests for an adapter; running requests still use it.

        Raises:
            ConfigError: no adapter has this name.
        """
        self.engine.remove_adapter(name)

    def requantize(self, quantization: Quantization) -> None:
        """Load the target again with another quantisation. Drafters are kept, unless they read the target's hidden states.

        The old target is freed after the new one is loaded, so memory must have room for both. If loading fails, nothing changes.

        Raises:
            ConfigError: `quantization` is unknown, or a request is running.
            CheckpointError, CapacityError: the new target cannot be loaded.
        """
        self._check_idle()
        drafters = list(self.engine.speculator.drafters)
        needs = DrafterNeeds.union(drafters)
        if needs.hidden_states or needs.layers:  # caches of drafters that read hidden states belong to the old target
            drafters = list(self._drafter_objects)
        config = replace(self._loaded.config, quantization=quantization, adapters={})
        loaded = load_engine(config, self._speculation, drafters, with_xlora=self.engine.runtime.supports_xlora)
        for adapter in self.engine.adapters.loaded:
            loaded.engine.add_adapter(adapter)
        with self.engine.between_steps():
            self._check_idle()
            self._loaded_or_none = loaded

    @contextmanager
    def _hold_engine(self) -> Iterator[LoadedEngine]:
        """Context manager: return the loaded engine, and prevent `requantize` from replacing it."""
        with ExitStack() as stack:
            while True:
                loaded = self._loaded
                with loaded.engine.between_steps():  # `requantize` replaces the engine between steps only
                    if loaded is self._loaded_or_none:
                        stack.enter_context(loaded.engine.keep_busy())
                        break
            yield loaded

    def _check_idle(self) -> None:
        if not self.engine.is_idle:
            raise ConfigError("the target cannot be requantized while a request is running: finish its stream or close it first")

    def _run_requests(self, prompts: Sequence[list[int]], params: Params, options: RequestOptions) -> list[RequestOutput]:
        with self._hold_engine() as loaded:
            requests = loaded.make_requests(prompts, params, options, is_streamed=False)
            with closing(loaded.engine.run(requests)) as steps:  # after Ctrl-C, the run is closed here and not by the garbage collector
                for _ in steps:
                    _ = self._loaded  # raises an error if another thread closed the LLM
            return [loaded.make_output(request) for request in requests]

    def _stream_request(self, prompt: list[int], params: Params, options: RequestOptions) -> Iterator[StreamChunk]:
        with self._hold_engine() as loaded:
            num_sent = dict.fromkeys(loaded.make_requests([prompt], params, options, is_streamed=True), 0)
            with closing(loaded.engine.run(list(num_sent))) as steps:
                while num_sent:
                    _ = self._loaded  # raises an error if the LLM is closed
                    if not _has_new_tokens(num_sent):  # steps of another thread may have added tokens
                        next(steps, None)
                    with loaded.engine.between_steps():
                        raise_first_error(list(num_sent))  # a step of another thread may have set an error
                        chunks = [loaded.make_chunk(request, sent) for request, sent in num_sent.items()]
                        num_sent = {request: request.num_output_tokens for request in num_sent if not request.is_finished}
                    yield from chunks  # outside the lock, because the caller may start steps between chunks


def _has_new_tokens(num_sent: Mapping[EngineRequest, int]) -> bool:
    """Return whether any request has ended or has unsent tokens. False if one failed: the next step raises its error."""
    if any(request.error is not None for request in num_sent):
        return False
    return any(request.is_finished or request.num_output_tokens > sent for request, sent in num_sent.items())
