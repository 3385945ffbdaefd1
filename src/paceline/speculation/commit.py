"""Making tokens permanent, one by one, the same way for plain and speculative steps."""

from collections.abc import Sequence

from paceline.speculation.request import FinishReason, Request, TokenOrigin


def commit(request: Request, token_ids: Sequence[int], num_accepted: int, *, drafted: bool) -> int:
    """Append tokens to a request until it ends; what comes after the end is dropped.

    Args:
        token_ids: accepted tokens, then the bonus token.
        num_accepted: how many of them are accepted drafts.
        drafted: whether the step had drafts.

    Returns:
        how many tokens were appended; `request.finish_reason` is set when one of them ended it.
    """
    for index, token in enumerate(token_ids):
        request.token_ids.append(token)
        request.processor.commit(token)
        request.origins.append(_origin(is_accepted=index < num_accepted, drafted=drafted))
        if token in request.end_token_ids and request.num_output_tokens > 0:
            request.finish_reason = FinishReason.STOP
        if request.text_stop is not None and _push_text(request, token):
            request.finish_reason = FinishReason.STOP
        if request.finish_reason is None and len(request.token_ids) >= request.max_len:
            request.finish_reason = FinishReason.LENGTH
        if request.finish_reason is not None:
            return index + 1
    return len(token_ids)


def _push_text(request: Request, token: int) -> bool:
    text_stop = request.text_stop
    if text_stop is None or token in request.end_token_ids:  # the token that ends a request is not part of its text
        return False
    return text_stop.push(token)


def _origin(*, is_accepted: bool, drafted: bool) -> TokenOrigin:
    if is_accepted:
        return TokenOrigin.ACCEPTED
    return TokenOrigin.BONUS if drafted else TokenOrigin.PLAIN
