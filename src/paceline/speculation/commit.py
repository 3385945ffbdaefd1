"""Commit: appends tokens to a request until a token finishes the request. Verification applies the same rule (`finish_reason`)."""

from collections.abc import Sequence

from paceline.runtimes.base import FloatArray
from paceline.sampling.logprobs import TokenLogprobs, processed_logprobs, raw_logprobs
from paceline.speculation.request import FinishReason, Request, StopMatcher, TokenOrigin


def finish_reason(request: Request, path: Sequence[int], stop_matcher: StopMatcher | None) -> FinishReason | None:
    """Return why the last token of `path` finishes the request; None if it does not.

    Args:
        path: tokens after the committed ones. The tokens before the last one must not finish the request.
        stop_matcher: matcher of stop strings, to which this call adds the last token; the others must have been added before. None = there
            are no stop strings.
    """
    is_end_token = path[-1] in request.end_token_ids
    is_full = len(request.token_ids) + len(path) >= request.max_len
    if stop_matcher is not None:
        if not is_end_token or request.params.include_stop:  # without `include_stop` an end token is not part of the text
            stop_matcher.push(path[-1])
        if is_end_token or is_full:
            stop_matcher.finish()
        if stop_matcher.is_stopped:
            return FinishReason.STOP
    if is_end_token or request.processor.is_complete(path):
        return FinishReason.STOP
    return FinishReason.LENGTH if is_full else None


def cannot_finish(request: Request, token_ids: Sequence[int]) -> bool:
    """Return whether it is certain that none of these next tokens finishes a request; False for requests with stop strings or a grammar."""
    return (
        request.stop_matcher is None
        and request.processor.grammar is None
        and len(request.token_ids) + len(token_ids) < request.max_len
        and request.end_token_ids.isdisjoint(token_ids)
    )


class FinishCheck:
    """Applies `finish_reason` to tokens before they are committed, one after the other. The request is not changed."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._path: list[int] = []
        self._stop_matcher: StopMatcher | None = None

    def finishes_with(self, token_id: int) -> bool:
        """Return whether this token, after the tokens of earlier calls, would finish the request."""
        stop_matcher = self._request.stop_matcher
        if self._stop_matcher is None and stop_matcher is not None and stop_matcher.can_stop:
            self._stop_matcher = stop_matcher.copy()
        self._path.append(token_id)
        return finish_reason(self._request, self._path, self._stop_matcher) is not None


def commit(
    request: Request, token_ids: Sequence[int], num_accepted: int, *, has_draft: bool, logprobs: Sequence[TokenLogprobs] = ()
) -> int:
    """Append tokens to a request until it finishes; tokens after that are dropped.

    Args:
        token_ids: accepted tokens, then the bonus token.
        num_accepted: number of accepted tokens.
        has_draft: whether the step had a draft.
        logprobs: log-probability of each token; empty if they were not requested.

    Returns:
        the number of tokens appended; `request.finish_reason` is set if the last of them finished it.
    """
    num_before = len(request.token_ids)
    if cannot_finish(request, token_ids):
        request.token_ids.extend(token_ids)
        request.processor.commit(*token_ids)
    else:
        for token in token_ids:
            request.finish_reason = finish_reason(request, (token,), request.stop_matcher)
            request.token_ids.append(token)
            request.processor.commit(token)
            if request.finish_reason is not None:
                break
    count = len(request.token_ids) - num_before
    num_accepted = min(num_accepted, count)
    last_origin = TokenOrigin.BONUS if has_draft else TokenOrigin.PLAIN
    request.origins.extend([TokenOrigin.ACCEPTED] * num_accepted + [last_origin] * (count - num_accepted))
    request.logprobs.extend(logprobs[:count])
    return count


def token_logprobs(token_ids: Sequence[int], nodes: Sequence[int], logits: FloatArray, request: Request) -> list[TokenLogprobs]:
    """Return the log-probabilities of the tokens of a step. Call this before the tokens are committed.

    Args:
        token_ids: accepted tokens, then the bonus token.
        nodes: accepted nodes of the draft tree.
        logits: [N, V], one row for each node of the draft tree.
        request: `request.params.logprobs` is the number of alternatives to list.
    """
    num_top = request.params.logprobs or 0
    rows = [logits[node] for node in (0, *nodes)]
    if request.params.logprobs_mode == "raw":
        return [raw_logprobs(row, token, num_top) for row, token in zip(rows, token_ids, strict=True)]
    return [
        processed_logprobs(request.processor.process(row, token_ids[:depth]), token_ids[depth], num_top) for depth, row in enumerate(rows)
    ]


def prompt_logprobs(request: Request, logits: FloatArray) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of the prompt tokens that this pass predicts; None for the prompt's first token, which no row predicts.

    Args:
        request: prompt tokens already in `request.prompt_logprobs`, computed before a preemption, are skipped.
        logits: [rows, V], from position `committed_len` on.
    """
    start, num_top = request.cached_sequence.committed_len, request.params.prompt_logprobs or 0
    logprobs: list[TokenLogprobs | None] = [] if request.prompt_logprobs else [None]
    first_missing = len(request.prompt_logprobs) + len(logprobs)
    for index in range(max(first_missing, start + 1), min(start + len(logits) + 1, request.num_prompt_tokens)):
        logprobs.append(raw_logprobs(logits[index - 1 - start], request.token_ids[index], num_top))
    return logprobs
