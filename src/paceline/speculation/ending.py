"""Where a request ends: one rule, for tokens that are committed and for those that a walk is about to keep."""

from collections.abc import Sequence

from paceline.speculation.request import FinishReason, Request
from paceline.speculation.stop import TextStop


def reason_to_end(request: Request, path: Sequence[int], text_stop: TextStop | None) -> FinishReason | None:
    """Why a request ends with the last token of `path`; None where it goes on.

    Args:
        path: tokens behind those of the request, none of which but the last one can end it.
        text_stop: has seen every token before the last one, which it is given; None = no text can end the request.
    """
    ends = path[-1] in request.end_token_ids
    is_full = len(request.token_ids) + len(path) >= request.max_len
    if text_stop is not None:
        if not ends or request.params.include_stop:  # else the token that ends a request is no part of its text
            text_stop.push(path[-1])
        if ends or is_full:
            text_stop.finish()
        if text_stop.is_stopped:
            return FinishReason.STOP
    if ends or request.processor.is_complete(path):
        return FinishReason.STOP
    return FinishReason.LENGTH if is_full else None


def goes_on_behind(request: Request, token_ids: Sequence[int]) -> bool:
    """Whether none of the tokens behind a request's ends it; False also where that takes a look at its text or its grammar."""
    return (
        request.text_stop is None
        and request.processor.constraint is None
        and len(request.token_ids) + len(token_ids) < request.max_len
        and request.end_token_ids.isdisjoint(token_ids)
    )


class LookAhead:
    """Follows tokens that are not committed yet, to see where they would end a request; the request stays as it is."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._path: list[int] = []
        self._text_stop: TextStop | None = None

    def ends_with(self, token_id: int) -> bool:
        """Whether the request ends with this token, which follows those asked about before; none of them ended it."""
        text_stop = self._request.text_stop
        if self._text_stop is None and text_stop is not None and text_stop.can_stop:
            self._text_stop = text_stop.copy()
        self._path.append(token_id)
        return reason_to_end(self._request, self._path, self._text_stop) is not None
