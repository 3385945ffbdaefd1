"""Making tokens permanent, one by one, the same way for plain and speculative steps."""

from collections.abc import Sequence

from paceline.sampling.logprobs import TokenLogprobs
from paceline.speculation.request import FinishReason, Request, TokenOrigin


def commit(request: Request, token_ids: Sequence[int], num_accepted: int, *, drafted: bool, logprobs: Sequence[TokenLogprobs] = ()) -> int:
    """Append tokens to a request until it ends; what comes after the end is dropped.

    Args:
        token_ids: accepted tokens, then the bonus token.
        num_accepted: how many of them are accepted drafts.
        drafted: whether the step had drafts.
        logprobs: of each token, or empty where nobody asked.

    Returns:
        how many tokens were appended; `request.finish_reason` is set when one of them ended it.
    """
    count = 0
    for count, token in enumerate(token_ids, 1):
        request.token_ids.append(token)
        request.processor.commit(token)
        request.origins.append(_origin(is_accepted=count <= num_accepted, drafted=drafted))
        request.finish_reason = _reason_to_end(request, token)
        if request.finish_reason is not None:
            break
    if logprobs:
        request.logprobs.extend(logprobs[:count])
    return count


def _reason_to_end(request: Request, token: int) -> FinishReason | None:
    ends = token in request.end_token_ids
    is_full = len(request.token_ids) >= request.max_len
    text_stop = request.text_stop
    if text_stop is not None:
        if not ends or request.params.include_stop:  # else the token that ends a request is no part of its text
            text_stop.push(token)
        if ends or is_full:
            text_stop.finish()
        if text_stop.is_stopped:
            return FinishReason.STOP
    if ends or _has_complete_grammar(request):
        return FinishReason.STOP
    return FinishReason.LENGTH if is_full else None


def _has_complete_grammar(request: Request) -> bool:
    """Whether nothing may follow what a grammar allowed: models without an end token have no other way to say so."""
    constraint = request.processor.constraint
    return constraint is not None and bool(getattr(constraint, "is_finished", False))


def _origin(*, is_accepted: bool, drafted: bool) -> TokenOrigin:
    if is_accepted:
        return TokenOrigin.ACCEPTED
    return TokenOrigin.BONUS if drafted else TokenOrigin.PLAIN
