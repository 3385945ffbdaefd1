"""What it costs a drafter to read tokens it has not seen."""

NO_EXTRA_TOKENS = 16
"""As many tokens are read along with a guess: a pass over them costs what a pass over one does, or next to it."""
MOST_CAUGHT_UP = 128
"""As many tokens a drafter without a network reads whenever it is looked at; more it reads when it guesses."""
_SHARE_OF_NEW = 0.25


class ReadingTime:
    """Seconds that reading takes, by what it took lately.

    Args:
        token_s: seconds a token, measured before; 0 = nothing is known, and reading seems free.
    """

    def __init__(self, token_s: float = 0.0) -> None:
        self.token_s = token_s

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Told how long it took to read so many; few say nothing."""
        if num_tokens <= NO_EXTRA_TOKENS:
            return
        token_s = seconds / num_tokens
        self.token_s = token_s if self.token_s == 0.0 else (1.0 - _SHARE_OF_NEW) * self.token_s + _SHARE_OF_NEW * token_s

    def of(self, num_tokens: int) -> float:
        """Seconds that so many will take."""
        return self.token_s * num_tokens if num_tokens > NO_EXTRA_TOKENS else 0.0
