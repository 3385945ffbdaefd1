"""Prefill time of a draft model: the cost of tokens that it has not read yet."""

FREE_PREFILL_TOKENS = 16
"""Unread tokens that cost nothing extra: a pass over so many rows takes about the time of one row."""
MAX_CATCH_UP_TOKENS = 128
"""Unread tokens that a lookup drafter reads in `has_candidates`; more are left to `propose`."""
_SHARE_OF_NEW = 0.25


class PrefillTime:
    """Seconds of prefill, as a running average a token.

    Args:
        token_s: seconds a token, measured before; 0 = unknown.
    """

    def __init__(self, token_s: float = 0.0) -> None:
        self.token_s = token_s

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add a measurement; one of few tokens is ignored."""
        if num_tokens <= FREE_PREFILL_TOKENS:
            return
        token_s = seconds / num_tokens
        self.token_s = token_s if self.token_s == 0.0 else (1.0 - _SHARE_OF_NEW) * self.token_s + _SHARE_OF_NEW * token_s

    def of(self, num_tokens: int) -> float:
        """Expected seconds of so many tokens."""
        return self.token_s * num_tokens if num_tokens > FREE_PREFILL_TOKENS else 0.0
