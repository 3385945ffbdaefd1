"""Making tokens permanent, one by one, the same way for plain and speculative steps."""

from collections.abc import Sequence

from paceline.sampling.logprobs import TokenLogprobs
from paceline.speculation.ending import goes_on_behind, reason_to_end
from paceline.speculation.request import Request, TokenOrigin


def commit(request: Request, token_ids: Sequence[int], num_accepted: int, *, drafted: bool, logprobs: Sequence[TokenLogprobs] = ()) -> int:
    """Append tokens to a request until it ends; what comes after the end is dropped.

    Args:
        token_ids: accepted tokens, then the bonus token.
        num_accepted: how many of them are accepted drafts.
        drafted: whether the step had drafts.
        logprobs: of each token, or empty where they were not asked for.

    Returns:
        how many tokens were appended; `request.finish_reason` is set when one of them ended it.
    """
    if goes_on_behind(request, token_ids):
        count = len(token_ids)
        request.token_ids.extend(token_ids)
        request.processor.commit_all(token_ids)
        if num_accepted > 0:
            request.origins.extend([TokenOrigin.ACCEPTED] * num_accepted)
        request.origins.extend([TokenOrigin.BONUS if drafted else TokenOrigin.PLAIN] * (count - num_accepted))
        if logprobs:
            request.logprobs.extend(logprobs)
        return count
    count = 0
    for count, token in enumerate(token_ids, 1):
        reason = reason_to_end(request, (token,), request.text_stop)
        request.token_ids.append(token)
        request.processor.commit(token)
        request.origins.append(_origin(is_accepted=count <= num_accepted, drafted=drafted))
        if reason is not None:
            request.finish_reason = reason
            break
    if logprobs:
        request.logprobs.extend(logprobs[:count])
    return count


def _origin(*, is_accepted: bool, drafted: bool) -> TokenOrigin:
    if is_accepted:
        return TokenOrigin.ACCEPTED
    return TokenOrigin.BONUS if drafted else TokenOrigin.PLAIN
