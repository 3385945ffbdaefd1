"""Texts of single tokens, for answers that list them."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from paceline.sampling.logprobs import TokenLogprobs
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import piece_bytes, pieces_of

LEAST_LOGPROB = -9999.0  # OpenAI's, for what cannot be drawn: JSON has no infinity


class TokenTexts:
    """Texts of tokens, and log-probabilities in the APIs' shapes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _bytes(self) -> list[bytes]:
        return piece_bytes(pieces_of(self._tokenizer))

    def bytes_of(self, token_id: int) -> bytes:
        """Its bytes; none for ids that are no token."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def text_of(self, token_id: int) -> str:
        """Its text; of a part of a character OpenAI's spelling of the bytes."""
        piece = self.piece_of(token_id)
        return piece if isinstance(piece, str) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def piece_of(self, token_id: int) -> str | list[int]:
        """Its text; of a part of a character the bytes, as llama.cpp lists them."""
        spelled = self.bytes_of(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return list(spelled)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of several, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def chat_content(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The `logprobs` of a chat's choice."""
        content = [
            {
                **self._chat_token(one.token_id, one.logprob),
                "top_logprobs": [self._chat_token(token_id, logprob) for token_id, logprob in one.top],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self.bytes_of(token_id)
        return {"token": spelled.decode(errors="replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(spelled)}

    def completion_lists(self, logprobs: Sequence[TokenLogprobs | None], ids: Sequence[int], start: int) -> dict[str, Any]:
        """The `logprobs` of a completion's choice.

        Args:
            logprobs: None for a first token, which nothing predicts.
            ids: the tokens.
            start: characters before the first one.
        """
        texts = [self.text_of(token_id) for token_id in ids]
        offsets = [start]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else max(one.logprob, LEAST_LOGPROB) for one in logprobs],
            "top_logprobs": [None if one is None else self._best(one) for one in logprobs],
            "text_offset": offsets[:-1],
        }

    def prompt_entries(self, logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each prompt token the top tokens and itself, by id; None for the first."""
        return [None if one is None else self._ranked(one) for one in logprobs]

    def _ranked(self, one: TokenLogprobs) -> dict[str, Any]:
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(one.top, 1)} | {
            one.token_id: (one.logprob, one.rank)
        }
        return {
            str(token_id): {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": self.text_of(token_id)}
            for token_id, (logprob, rank) in ranked.items()
        }

    def _best(self, one: TokenLogprobs) -> dict[str, float]:
        """The best tokens and the token itself; of two with the same text the better one."""
        found: dict[str, float] = {}
        for token_id, logprob in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(self.text_of(token_id), max(logprob, LEAST_LOGPROB))
        return found
