"""Checks prompts and options, creates requests from them, and creates outputs from finished requests."""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from paceline.engine.chat_messages import parse_tools
from paceline.engine.chat_prompt import ChatOutputParser, chat_prompt
from paceline.engine.inputs import ChatOptions, Messages, Prompt, RequestOptions, parse_prompt, parse_token_ids, split_chat_options
from paceline.engine.request import EngineRequest, PromptOptions, SpeculationOptions
from paceline.engine.stop_matcher import StopStringMatcher
from paceline.errors import CONTEXT_LENGTH_EXCEEDED, RequestError, prompt_too_long_text
from paceline.kv_cache.cache import CachedSequence
from paceline.outputs import RequestOutput, StreamChunk, Timing, Usage
from paceline.parsing.registry import AUTO, OutputFormat
from paceline.runtimes.native.path_sampler import CompiledBatchPathSampler
from paceline.sampling.constraints import bad_word_ids
from paceline.sampling.grammars.compiler import GrammarCompiler
from paceline.sampling.params import SamplingParams, resolve_seed
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.request import FinishReason
from paceline.tokenizer.tokenizer import Tokenizer

DEFAULT_PROMPT_OPTIONS = PromptOptions()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Converts prompts to requests for one target, and finished requests to outputs. Thread-safe.

    Attributes:
        vocab_size: number of token ids that may be in a prompt or be sampled.
        max_model_len: maximum number of tokens of prompt and output together.
        eos_token_ids: ids that end an output.
        too_long_advice: advice to the user, in the error for a prompt that is too long.
        suppressed_token_ids: ids that the model's generation_config.json bans.
        num_threads: CPU threads for sampling.
        num_cache_tokens: capacity of the cache in tokens. If it is less than `max_model_len`, outputs end there. None = unknown.
        batch_sampler: sampler in compiled code; None = the compiled kernels are not available.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    eos_token_ids: Sequence[int]
    too_long_advice: str = "shorten the prompt"
    suppressed_token_ids: Sequence[int] = ()
    num_threads: int = 1
    num_cache_tokens: int | None = None
    logged_notices: set[str] = field(default_factory=set)
    grammar_compiler: GrammarCompiler = field(init=False)
    batch_sampler: CompiledBatchPathSampler | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grammar_compiler", GrammarCompiler(self.tokenizer, self.eos_token_ids))
        object.__setattr__(self, "batch_sampler", CompiledBatchPathSampler.if_available(self.vocab_size, self.num_threads))

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            RequestError: the prompt is empty, contains an unknown id, or is longer than the context.
        """
        parsed = parse_prompt(prompt)
        if isinstance(parsed, str):
            self.check_num_chars(len(parsed))
        ids = self.tokenizer.encode(parsed) if isinstance(parsed, str) else parsed
        if not ids:
            raise RequestError("the prompt is empty: give at least one token", parameter="prompt")
        _check_token_ids(ids, "prompt", self.vocab_size)
        if len(ids) > self.max_model_len:
            raise self._prompt_too_long_error(len(ids))
        return ids

    def chat_token_ids(self, messages: Messages, **options: Any) -> list[int]:
        """Return the token ids of a conversation; arguments as for `chat_prompt.chat_prompt`.

        Raises:
            RequestError, BackendUnavailableError: as for `prompt_ids` and `chat_prompt`.
        """
        return self.prompt_ids(chat_prompt(self, messages, **options).token_ids)

    def prepare_chat(self, messages: Messages, options: ChatOptions) -> tuple[list[int], ChatOutputParser, RequestOptions]:
        """Return the prompt of a conversation as token ids, the parser of its outputs, and the options of its request.

        Raises:
            ConfigError: `tool_call_parser` or `reasoning_parser` is unknown.
            RequestError, BackendUnavailableError: as for `chat_token_ids`.
        """
        prompt_options, request = split_chat_options(options)
        formats = OutputFormat.of(self.tokenizer, options.get("tool_call_parser", AUTO), options.get("reasoning_parser", AUTO))
        prompt = chat_prompt(self, messages, **prompt_options)
        parser = ChatOutputParser.for_prompt(self.tokenizer, formats, prompt, parse_tools(options.get("tools") or ()))
        if parser_ids := parser.shown_token_ids(self.tokenizer):
            caller_ids = parse_token_ids(request.get("shown_token_ids", ()), "shown_token_ids")
            request = {**request, "shown_token_ids": [*caller_ids, *parser_ids]}
        return self.prompt_ids(prompt.token_ids), parser, request

    def check_num_chars(self, num_chars: int) -> None:
        """Check that a text of this many characters may fit in the context. This is faster than encoding the text.

        Raises:
            RequestError: the text has more characters than `max_model_len` tokens can have.
        """
        max_token_chars = self.tokenizer.max_piece_chars
        if num_chars > self.max_model_len * max_token_chars:
            num_tokens = -(-num_chars // max_token_chars)
            raise self._prompt_too_long_error(num_tokens, f" (at least: it has {num_chars} characters, a token at most {max_token_chars})")

    def check_num_messages(self, num_messages: int) -> None:
        """Check that a conversation may fit in the context, because each message has at least one token.

        Raises:
            RequestError: there are more messages than tokens in the context.
        """
        if num_messages > self.max_model_len:
            raise self._prompt_too_long_error(num_messages, f" (at least: it has {num_messages} messages of one token or more)")

    def log_once(self, notice: str) -> None:
        """Log a notice, unless it was logged before."""
        if notice not in self.logged_notices:
            self.logged_notices.add(notice)
            log.warning(notice)

    def check_options(self, options: RequestOptions, num_prompts: int, *, has_prediction_drafter: bool) -> list[PromptOptions]:
        """Check the options of a call and return the options of each of its prompts.

        Args:
            has_prediction_drafter: whether a loaded drafter uses predictions.

        Raises:
            RequestError: an option has the wrong form, the numbers of predictions and prompts differ, or no drafter uses predictions.
        """
        namespace, salt = options.get("namespace"), options.get("cache_salt")
        if not isinstance(namespace, str | None):
            raise RequestError(f"namespace is {namespace!r}: give a string, or None", parameter="namespace")
        if not isinstance(salt, str | bytes | None):
            raise RequestError(f"cache_salt is {salt!r}: give a string, or None", parameter="cache_salt")
        speculation = SpeculationOptions.parse(options.get("speculation"))
        try:
            cache_salt = salt.encode() if isinstance(salt, str) else salt or b""
        except UnicodeEncodeError:
            text = f"cache_salt is {salt!r}, which is no valid Unicode: give another string, or bytes"
            raise RequestError(text, parameter="cache_salt") from None
        predictions = self._prediction_ids_of_prompts(options.get("prediction"), num_prompts, has_prediction_drafter=has_prediction_drafter)
        shown_ids = parse_token_ids(options.get("shown_token_ids", ()), "shown_token_ids")
        _check_token_ids(shown_ids, "shown_token_ids", self.tokenizer.vocab_size)  # the tokenizer may have more ids than the model
        adapters = _adapter_names(options.get("adapter"), num_prompts)
        return [
            PromptOptions(
                speculation=speculation,
                prediction_token_ids=prediction,
                namespace=namespace,
                cache_salt=cache_salt,
                shown_token_ids=tuple(shown_ids),
                adapter=adapter,
            )
            for prediction, adapter in zip(predictions, adapters, strict=True)
        ]

    def make_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        is_streamed: bool,
        options: PromptOptions = DEFAULT_PROMPT_OPTIONS,
        sample_index: int = 0,
        first_sample: EngineRequest | None = None,
    ) -> EngineRequest:
        """Create the request of one sample.

        Args:
            first_sample: the first sample of the prompt, which has the same seed; None = this is the first sample.

        Raises:
            RequestError: an id in `params` is unknown, its grammar does not compile, or the prompt is as long as the context. With
                `prompt_logprobs` and `max_tokens` = 1, the prompt may be as long as the context.
        """
        prompt = list(prompt_token_ids)
        if len(prompt) >= self.max_model_len and (params.prompt_logprobs is None or params.max_tokens > 1):
            raise self._prompt_too_long_error(len(prompt))
        end_token_ids = set(params.stop_token_ids) if params.ignore_eos else {*params.stop_token_ids, *self.eos_token_ids}
        stop = tuple(params.stop or ())
        stop_matcher = None
        if stop or is_streamed or options.shown_token_ids:
            stop_matcher = StopStringMatcher(self.tokenizer.detokenizer(options.shown_token_ids), stop, include_stop=params.include_stop)
        return EngineRequest(
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            params=params,
            processor=self._logits_processor(prompt, params),
            cached_sequence=CachedSequence(),  # a placeholder until the engine adds the request
            seed=resolve_seed(params) if first_sample is None else first_sample.seed,
            sample_index=sample_index,
            max_len=min(self._max_total_len(len(prompt)), len(prompt) + params.max_tokens),
            end_token_ids=frozenset(end_token_ids),
            stop_matcher=stop_matcher,
            num_speculative_tokens=options.speculation.num_speculative_tokens if options.speculation.enabled else 0,
            drafter=options.speculation.drafter,
            keeps_step_records=options.speculation.trees,
            prediction_token_ids=options.prediction_token_ids,
            namespace=options.namespace,
            cache_salt=options.cache_salt,
            adapter=options.adapter,
            first_sample=first_sample,
        )

    def make_samples(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, options: PromptOptions, *, is_streamed: bool
    ) -> list[EngineRequest]:
        """Create the `n` requests that sample one prompt.

        All share a seed and have the sample indices 0 to `n` - 1. Each later sample refers to the first as its `first_sample`.

        Raises:
            RequestError: as for `make_request`.
        """
        samples = list[EngineRequest]()
        for index in range(params.n):
            first = samples[0] if samples else None
            samples.append(
                self.make_request(
                    prompt_token_ids, params, is_streamed=is_streamed, options=options, sample_index=index, first_sample=first
                )
            )
        return samples

    def make_chunk(self, request: EngineRequest, num_sent: int, output: RequestOutput | None) -> StreamChunk:
        """Return a chunk of the output tokens after the first `num_sent`, with their text; the last chunk contains `output`."""
        text = request.stop_matcher.take_new_text() if request.stop_matcher is not None else ""
        start = request.num_prompt_tokens + num_sent
        shows_prompt = num_sent == 0 and request.params.prompt_logprobs is not None
        return StreamChunk(
            text,
            request.token_ids[start:],
            request.origins[num_sent:],
            output,
            sample_index=request.sample_index,
            logprobs=request.logprobs[num_sent:],
            usage=self._request_usage(request),
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens] if shows_prompt else [],
            prompt_logprobs=list(request.prompt_logprobs) if shows_prompt else [],
            steps=request.steps[bisect_left(request.steps, num_sent, key=attrgetter("start")) :],
        )

    def make_output(self, request: EngineRequest, *, numerics: str, drafter: str) -> RequestOutput:
        ids = list(request.output_token_ids)
        first_token_s = request.first_token_s or request.finished_s
        return RequestOutput(
            text=self._decode_output(request, ids),
            token_ids=ids,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            finish_reason=(request.finish_reason or FinishReason.LENGTH).value,
            usage=self._request_usage(request),
            timing=Timing(first_token_s - (request.started_s or first_token_s), request.finished_s - first_token_s),
            seed=request.seed,
            sample_index=request.sample_index,
            numerics=numerics,
            drafter=drafter,
            speculation=request.stats,
            origins=request.origins,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            prompt_logprobs=request.prompt_logprobs if request.params.prompt_logprobs is not None else None,
            stop_text=None if request.stop_matcher is None else request.stop_matcher.matched_stop,
            steps=request.steps if request.keeps_step_records else None,
        )

    def _request_usage(self, request: EngineRequest) -> Usage:
        return Usage(request.num_prompt_tokens, request.num_output_tokens, request.num_cached_tokens)

    def _logits_processor(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> LogitsProcessor:
        params.check_vocabulary(self.vocab_size)
        grammar = None if params.grammar is None else self.grammar_compiler.new_matcher(params.grammar, prompt_token_ids)
        if self.suppressed_token_ids:
            params = replace(params, banned_token_ids=(*params.banned_token_ids, *self.suppressed_token_ids))
        banned_words = bad_word_ids(params.bad_words, self._encode_without_special_tokens) if params.bad_words else ()
        sampler = None
        if self.batch_sampler is not None:
            sampler = self.batch_sampler.path_sampler(
                temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
            )
        return LogitsProcessor(
            params, self.vocab_size, prompt_token_ids, self.eos_token_ids, grammar=grammar, bad_word_ids=banned_words, path_sampler=sampler
        )

    def _encode_without_special_tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _prediction_ids_of_prompts(self, prediction: object, num_prompts: int, *, has_prediction_drafter: bool) -> list[tuple[int, ...]]:
        """Return the predicted token ids of each prompt; empty if it has no prediction."""
        if prediction is None:
            return [()] * num_prompts
        if not has_prediction_drafter:
            raise RequestError(
                'a prediction is given, but no drafter in use reads it: load the model with drafter="prediction", or a list such as '
                '["prediction", "suffix"]',
                parameter="prediction",
            )
        if _is_single_prediction(prediction):
            return [self._prediction_ids(prediction)] * num_prompts
        if not isinstance(prediction, Sequence) or len(prediction) != num_prompts:
            raise RequestError(
                f"prediction is {prediction!r} for {num_prompts} prompts: give one text, one list of token ids, or a list with one of "
                "these or None for each prompt",
                parameter="prediction",
            )
        return [() if one is None else self._prediction_ids(one) for one in prediction]

    def _prediction_ids(self, prediction: object) -> tuple[int, ...]:
        if isinstance(prediction, str):
            return tuple(self._encode_without_special_tokens(prediction))
        ids = parse_token_ids(prediction, "prediction")
        _check_token_ids(ids, "prediction", self.vocab_size)
        return tuple(ids)

    def _max_total_len(self, num_prompt_tokens: int) -> int:
        """Return the maximum length of prompt and output together: the context, or the cache's capacity if the prompt fits in it."""
        if self.num_cache_tokens is None or num_prompt_tokens >= self.num_cache_tokens:
            return self.max_model_len
        return min(self.max_model_len, self.num_cache_tokens)

    def _prompt_too_long_error(self, num_tokens: int, explanation: str = "") -> RequestError:
        text = prompt_too_long_text(num_tokens, self.max_model_len, self.too_long_advice, explanation=explanation)
        return RequestError(text, parameter="prompt", code=CONTEXT_LENGTH_EXCEEDED)

    def _decode_output(self, request: EngineRequest, ids: list[int]) -> str:
        if request.stop_matcher is not None:
            return request.stop_matcher.finish()
        ended_by_token = ids and ids[-1] in request.end_token_ids and not request.params.include_stop
        return self.tokenizer.decode(ids[:-1] if ended_by_token else ids)


def _check_token_ids(ids: Sequence[int], name: str, vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{name} contains token id {token_id}; this model's ids go from 0 to {vocab_size - 1}", parameter=name)


def _adapter_names(adapter: object, num_prompts: int) -> Sequence[str | None]:
    per_prompt: Sequence[object] = adapter if isinstance(adapter, list | tuple) else [adapter] * num_prompts
    names = [name for name in per_prompt if isinstance(name, str | None)]
    if len(per_prompt) != num_prompts or len(names) != num_prompts:
        text = f"adapter is {adapter!r} for {num_prompts} prompts: give the name of a loaded adapter, or a list with one or None for each"
        raise RequestError(text, parameter="adapter")
    return names


def _is_single_prediction(prediction: object) -> bool:
    """Return whether a prediction is one string or one list of ids, rather than a list of predictions."""
    if isinstance(prediction, str) or not isinstance(prediction, Sequence):
        return isinstance(prediction, str) or hasattr(prediction, "dtype")  # numpy arrays are not registered as Sequence
    return all(not isinstance(item, str | Sequence | None) for item in prediction)
