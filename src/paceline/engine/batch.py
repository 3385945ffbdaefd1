"""From what a user asked to a request, and from a finished request to what the user gets."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import RequestError
from paceline.kv_cache.paged import KVCache
from paceline.outputs import RequestOutput, Timing, Usage
from paceline.sampling.params import SamplingParams, resolve_seed
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.request import DraftHints, FinishReason, Request
from paceline.speculation.stop import TextStop
from paceline.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Checks prompts against a target and turns them into requests.

    Attributes:
        vocab_size: ids that may stand in a prompt and be drawn.
        max_context: prompt + output at most.
        eos_token_ids: ids that end an output.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_context: int
    eos_token_ids: Sequence[int]

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt.

        Raises:
            RequestError: it is empty, holds an id that does not exist, or leaves no room for output.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _as_ids(prompt, "prompt")
        if not ids:
            raise RequestError("the prompt is empty: give at least one token", parameter="prompt")
        self._check_ids(ids, "prompt")
        if len(ids) >= self.max_context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, the context holds {self.max_context} and at least one must be left for the output: "
                "shorten the prompt or raise max_context",
                parameter="prompt",
            )
        return ids

    def hints(self, prediction: object, namespace: str | None, num_prompts: int, *, are_predictions_read: bool) -> list[DraftHints]:
        """What drafters are told about each of `num_prompts` prompts.

        Args:
            prediction: text or token ids the outputs will resemble, or a list of these, or of None, one for each prompt.
            are_predictions_read: whether the drafter has a use for them.

        Raises:
            RequestError: a prediction is neither text nor token ids, nobody reads it, or there are not as many as prompts.
        """
        if not isinstance(namespace, str | None):
            raise RequestError(f"namespace is {namespace!r}: give a string, or None", parameter="namespace")
        if prediction is None:
            return [DraftHints(namespace=namespace)] * num_prompts
        if not are_predictions_read:
            raise RequestError(
                'a prediction is given, but no drafter in use reads it: load the model with drafter="prediction", or a list such as '
                '["prediction", "ngram"]',
                parameter="prediction",
            )
        if _is_one_text(prediction):
            return [DraftHints(self._prediction_ids(prediction), namespace)] * num_prompts
        if not isinstance(prediction, Sequence) or len(prediction) != num_prompts:
            raise RequestError(
                f"prediction is {prediction!r} for {num_prompts} prompts: give one text, one list of token ids, or a list with one of "
                "these or None for each prompt",
                parameter="prediction",
            )
        return [DraftHints(() if one is None else self._prediction_ids(one), namespace) for one in prediction]

    def make(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        cache: KVCache,
        *,
        is_streamed: bool,
        hints: DraftHints = DraftHints(),  # noqa: B008  # frozen
    ) -> Request:
        """A request with an empty sequence in `cache`.

        Raises:
            RequestError: an id in `params` does not exist.
        """
        processor = LogitsProcessor(params, self.vocab_size, prompt_token_ids, self.eos_token_ids)
        ends = set(params.stop_token_ids) if params.ignore_eos else {*params.stop_token_ids, *self.eos_token_ids}
        stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
        text_stop = None
        if stop or is_streamed:
            text_stop = TextStop(self.tokenizer.detokenizer(), stop, include_stop=params.include_stop)
        return Request(
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
            params=params,
            processor=processor,
            sequence=cache.new_sequence(),
            seed=resolve_seed(params),
            sample_index=0,
            max_len=min(self.max_context, len(prompt_token_ids) + params.max_tokens),
            end_token_ids=frozenset(ends),
            text_stop=text_stop,
            hints=hints,
        )

    def output(self, request: Request, *, numerics: str, drafter: str) -> RequestOutput:
        """What a finished request returns."""
        ids = list(request.output_token_ids)
        return RequestOutput(
            text=self._text(request, ids),
            token_ids=ids,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            finish_reason=(request.finish_reason or FinishReason.LENGTH).value,
            usage=Usage(request.num_prompt_tokens, len(ids)),
            timing=Timing(request.first_token_s - request.started_s, request.finished_s - request.first_token_s),
            seed=request.seed,
            numerics=numerics,
            drafter=drafter,
            speculation=request.stats,
            origins=request.origins,
        )

    def _prediction_ids(self, prediction: object) -> tuple[int, ...]:
        if isinstance(prediction, str):
            return tuple(self.tokenizer.encode(prediction, add_special_tokens=False))
        ids = _as_ids(prediction, "prediction")
        self._check_ids(ids, "prediction")
        return tuple(ids)

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(f"{name} holds token id {token_id}; this model's ids go from 0 to {self.vocab_size - 1}", parameter=name)

    def _text(self, request: Request, ids: list[int]) -> str:
        if request.text_stop is not None:
            return request.text_stop.finish()
        ended_by_token = ids and ids[-1] in request.end_token_ids and not request.params.include_stop
        return self.tokenizer.decode(ids[:-1] if ended_by_token else ids)


def _is_one_text(prediction: object) -> bool:
    """Whether it is a string or a list of ids, not a list of these."""
    if isinstance(prediction, str) or not isinstance(prediction, Sequence):
        return isinstance(prediction, str) or hasattr(prediction, "dtype")  # an array of ids is no Sequence
    return all(not isinstance(item, str | Sequence | None) for item in prediction)


def _as_ids(ids: object, name: str) -> list[int]:
    if not isinstance(ids, Iterable) or isinstance(ids, bytes | bytearray):
        raise RequestError(f"{name} is {ids!r}: give a string or a list of token ids", parameter=name)
    return [_as_id(item, name) for item in ids]


def _as_id(item: object, name: str) -> int:
    try:
        if not isinstance(item, bool):
            return operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise RequestError(f"{name} holds {item!r}, which is no token id: give a string or whole numbers", parameter=name)
