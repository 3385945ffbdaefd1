"""Commit: appending tokens to a request, and the rule by which a request finishes, which verification of drafts applies as well."""

from collections.abc import Sequence

from paceline.runtimes.base import FloatArray
from paceline.sampling.logprobs import TokenLogprobs, processed_logprobs, raw_logprobs
from paceline.speculation.request import FinishReason, Request, StopMatcher, TokenOrigin


def finish_reason(request: Request, path: Sequence[int], text_stop: StopMatcher | None) -> FinishReason | None:
    """Return why the last token of `path` finishes the request; None if it does not.

    Args:
        path: uncommitted tokens after those of the request; none before the last one finishes it.
        text_stop: matcher of stop texts, which has seen every token but the last one and is given that one; None = no stop texts.
    """
    is_end_token = path[-1] in request.end_token_ids
    is_full = len(request.token_ids) + len(path) >= request.max_len
    if text_stop is not None:
        if not is_end_token or request.params.include_stop:  # the text excludes an end token unless `include_stop` is set
            text_stop.push(path[-1])
        if is_end_token or is_full:
            text_stop.finish()
        if text_stop.is_stopped:
            return FinishReason.STOP
    if is_end_token or request.processor.is_complete(path):
        return FinishReason.STOP
    return FinishReason.LENGTH if is_full else None


def cannot_finish(request: Request, token_ids: Sequence[int]) -> bool:
    """Return whether none of these next tokens can finish a request, as far as that is certain without its text and grammar."""
    return (
        request.text_stop is None
        and request.processor.grammar is None
        and len(request.token_ids) + len(token_ids) < request.max_len
        and request.end_token_ids.isdisjoint(token_ids)
    )


class FinishLookahead:
    """Applies the rule of `finish_reason` to tokens that are not committed. The request is not changed."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._path: list[int] = []
        self._text_stop: StopMatcher | None = None

    def finishes_with(self, token_id: int) -> bool:
        """Return whether the request would finish with this token, after the tokens of earlier calls."""
        text_stop = self._request.text_stop
        if self._text_stop is None and text_stop is not None and text_stop.can_stop:
            self._text_stop = text_stop.copy()
        self._path.append(token_id)
        return finish_reason(self._request, self._path, self._text_stop) is not None


def commit(
    request: Request, token_ids: Sequence[int], num_accepted: int, *, has_draft: bool, logprobs: Sequence[TokenLogprobs] = ()
) -> int:
    """Append tokens to a request until it finishes; tokens after that are dropped.

    Args:
        token_ids: accepted tokens, then the bonus token.
        num_accepted: number of accepted tokens.
        has_draft: whether the step had a draft.
        logprobs: log-probabilities of each token; empty = not needed.

    Returns:
        the number of tokens appended; `request.finish_reason` is set if one of them finished it.
    """
    num_before = len(request.token_ids)
    if cannot_finish(request, token_ids):
        request.token_ids.extend(token_ids)
        request.processor.commit(*token_ids)
    else:
        for token in token_ids:
            request.finish_reason = finish_reason(request, (token,), request.text_stop)
            request.token_ids.append(token)
            request.processor.commit(token)
            if request.finish_reason is not None:
                break
    count = len(request.token_ids) - num_before
    num_accepted = min(num_accepted, count)
    own = TokenOrigin.BONUS if has_draft else TokenOrigin.PLAIN
    request.origins.extend([TokenOrigin.ACCEPTED] * num_accepted + [own] * (count - num_accepted))
    request.logprobs.extend(logprobs[:count])
    return count


def token_logprobs(token_ids: Sequence[int], nodes: Sequence[int], logits: FloatArray, request: Request) -> list[TokenLogprobs]:
    """Return the log-probabilities of the tokens of a step, before they are committed.

    Args:
        token_ids: accepted tokens, then the bonus token.
        nodes: accepted nodes.
        logits: [N, V] of the tree.
        request: with `params.logprobs`.
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
        request: tokens whose log-probabilities were computed before a preemption are skipped.
        logits: [rows, V], from position `committed_len` on.
    """
    start, num_top = request.sequence.committed_len, request.params.prompt_logprobs or 0
    found: list[TokenLogprobs | None] = [] if request.prompt_logprobs else [None]
    first = len(request.prompt_logprobs) + len(found)
    for index in range(max(first, start + 1), min(start + len(logits) + 1, request.num_prompt_tokens)):
        found.append(raw_logprobs(logits[index - 1 - start], request.token_ids[index], num_top))
    return found
