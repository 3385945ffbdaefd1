"""Draft models with another vocabulary: by ids if most pieces are shared, else through text. Only the target's tokens are ever kept.

Sources: Timor et al. 2025, arXiv:2502.05202, algorithm 4 (token-level intersection) and algorithm 2 (text; there, too, the re-encoded
draft is checked token by token). Deviation: with ids, the draft row over the shared pieces is drawn from with the target's noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import numpy as np

from paceline.runtimes.base import FloatArray
from paceline.speculation.drafter import DraftBudget, Drafter, DrafterTraits, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import IdMap, Speller, match_ids, piece_bytes, pieces_of

NUM_RETOKENIZED_TOKENS = 10
"""Last tokens of a text that are tokenized again with the text after them, which can change them."""


class ByteTokenizer:
    """A tokenizer of bytes that returns each token with its number of bytes.

    Attributes:
        pieces, bytes_of: by id, the vocabulary's spelling and the bytes that it stands for.
        start: special tokens that it puts before a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces = pieces_of(tokenizer)
        self.bytes_of = piece_bytes(self.pieces)
        self.special_token_ids = tokenizer.special_token_ids
        self._encode = tokenizer.encode
        self._speller = Speller(self.pieces)
        self.bos_ids = tuple(takewhile(self.special_token_ids.__contains__, tokenizer.encode("a")))
        self._adds_space = self._spelled_bytes(tokenizer.encode("a", add_special_tokens=False)) == b" a"

    def tokenize(self, text: bytes, *, at_start: bool = False) -> list[tuple[int, int]]:
        """Return the token ids of `text`, each with its number of bytes.

        These are the tokenizer's own tokens if they spell `text`, else the longest pieces from the left. Bytes without a piece count as
        part of the token before them.

        Args:
            at_start: `text` is the beginning of a text, so a space that the tokenizer adds there is expected.
        """
        natural = self._tokenize_as_text(text, at_start=at_start)
        if natural is not None:
            return natural
        tokens: list[tuple[int, int]] = []
        ids = self._speller.spell(text)
        if ids is not None:
            return [(token_id, len(self.bytes_of[token_id])) for token_id in ids]
        for part in _characters(text):
            ids = self._speller.spell(part)
            if ids is not None:
                tokens.extend((token_id, len(self.bytes_of[token_id])) for token_id in ids)
            elif tokens:
                tokens[-1] = (tokens[-1][0], tokens[-1][1] + len(part))
        return tokens

    def retokenize_from(self, token_ids: Sequence[int], first: int) -> int:
        """Return the index, at least `first`, from which a text is tokenized again: a token near the end that begins with a space."""
        index = max(first, len(token_ids) - NUM_RETOKENIZED_TOKENS)
        least = max(first, len(token_ids) - 4 * NUM_RETOKENIZED_TOKENS)
        while index > least and not self.bytes_of[token_ids[index]].startswith(b" "):
            index -= 1
        return index

    def _tokenize_as_text(self, text: bytes, *, at_start: bool) -> list[tuple[int, int]] | None:
        try:
            string = text.decode()
        except UnicodeDecodeError:
            return None
        expected = text
        if self._adds_space and string.startswith(" "):
            string = string[1:]
        elif self._adds_space and at_start:
            expected = b" " + text
        ids = self._encode(string, add_special_tokens=False)
        if self._spelled_bytes(ids) != expected:
            return None
        sizes = [len(self.bytes_of[token_id]) for token_id in ids]
        if sizes:
            sizes[0] -= len(expected) - len(text)
        return list(zip(ids, sizes, strict=True))

    def _spelled_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.bytes_of[token_id] for token_id in ids if token_id < len(self.bytes_of))


class SharedPieces:
    """Maps tokens between vocabularies through the pieces that both have; a draft model's other ids are never drafted.

    Args:
        target, draft: the two tokenizers.
        vocab_size: V of the target.
        draft_vocab_size: V of the draft model.
    """

    def __init__(self, target: ByteTokenizer, draft: ByteTokenizer, *, vocab_size: int, draft_vocab_size: int) -> None:
        self._target, self._draft = target, draft
        self._vocab_size = vocab_size
        self._to_draft = match_ids(target.pieces, draft.pieces)
        to_target = match_ids(draft.pieces, target.pieces)[:draft_vocab_size]
        draft_ids = np.flatnonzero((to_target >= 0) & (to_target < vocab_size))
        target_ids = to_target[draft_ids]
        pairs = self._to_draft[target_ids] == draft_ids  # keep one-to-one pairs only: a piece may occur twice in a vocabulary
        self._draft_ids, self._target_ids = _consecutive_as_slice(draft_ids[pairs]), _consecutive_as_slice(target_ids[pairs])
        self._to_draft[self._to_draft >= draft_vocab_size] = -1
        self._spelled: dict[int, tuple[int, ...]] = {}
        self._contexts = RequestState[tuple[list[int], int]]()

    def context(self, request: Request) -> Sequence[int]:
        """Return the request's tokens as the draft model's ids; later calls only append."""
        ids, num_read = self._contexts.get(request) or (list(self._draft.bos_ids), _num_start_tokens(self._target, request))
        for token_id in request.token_ids[num_read:]:
            ids.extend(self._spell_in_shared_pieces(token_id))
        self._contexts[request] = ids, len(request.token_ids)
        return ids

    def target_row(self, row: FloatArray) -> FloatArray:
        """Return a draft model's logits as logits [V] over the target's ids, -inf for ids that cannot be drafted."""
        scores = np.full(self._vocab_size, -np.inf, np.float32)
        scores[self._target_ids] = row[self._draft_ids]
        return scores

    def draft_id(self, token_id: int) -> int:
        """Return the draft model's id of a target token that can be drafted."""
        return int(self._to_draft[token_id])

    def _spell_in_shared_pieces(self, token_id: int) -> tuple[int, ...]:
        mapped = int(self._to_draft[token_id]) if token_id < len(self._to_draft) else -1
        if mapped >= 0:
            return (mapped,)
        if token_id not in self._spelled:
            text = self._target.bytes_of[token_id] if token_id < len(self._target.bytes_of) else b""
            self._spelled[token_id] = tuple(draft_id for draft_id, _ in self._draft.tokenize(text))
        return self._spelled[token_id]


class GreedyTextModel(Protocol):
    """A draft model that continues texts in its own ids (see `DraftModelDrafter.generate`)."""

    name: str
    traits: DrafterTraits

    def generate(
        self, requests: Sequence[Request], contexts: Sequence[tuple[Sequence[int], int]], counts: Sequence[int]
    ) -> list[list[int]]: ...

    def prefill_s(self, request: Request) -> float: ...

    def release(self, request: Request) -> None: ...


@dataclass(slots=True)
class _RetokenizedContext:
    """One request's text as the draft model's tokens.

    Attributes:
        num_read: tokens of the request that `text` holds.
        ids: the draft model's.
        token_ends: offset in `text` at which each token ends.
    """

    num_read: int
    ids: list[int]
    token_ends: list[int]
    text: bytearray = field(default_factory=bytearray)


class TextDrafter(Drafter):
    """Drafts with a model of any vocabulary: the target's tokenizer tokenizes the text that the model generates.

    The model generates its most probable text. If the last word may be incomplete, its last token is left out.

    Args:
        model: the draft model.
        target, draft: the two tokenizers.
    """

    def __init__(self, model: GreedyTextModel, target: ByteTokenizer, draft: ByteTokenizer) -> None:
        self.model = model
        self.name = model.name
        self.traits = model.traits
        self._target, self._draft = target, draft
        self._contexts = RequestState[_RetokenizedContext]()

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: list[DraftTree | None] = [None] * len(requests)
        depths = [budget.max_tokens for budget in budgets]
        contexts = {i: context for i, depth in enumerate(depths) if depth > 0 and (context := self._context(requests[i])) is not None}
        texts = self.model.generate([requests[i] for i in contexts], list(contexts.values()), [depths[i] for i in contexts])
        for index, draft_ids in zip(contexts, texts, strict=True):
            token_ids = self._target_ids(requests[index], draft_ids)[: depths[index]]
            if token_ids:
                trees[index] = DraftTree.chain(requests[index].token_ids[-1], token_ids, self.name)
        return trees

    def prefill_s(self, request: Request) -> float:
        return self.model.prefill_s(request)

    def release(self, request: Request) -> None:
        self.model.release(request)

    def _context(self, request: Request) -> tuple[Sequence[int], int] | None:
        """Return the draft model's ids of the request's text, and how many are unchanged; None if the text ends inside a character."""
        start = self._draft.bos_ids
        known = self._contexts.get(request)
        if known is None:
            known = _RetokenizedContext(_num_start_tokens(self._target, request), list(start), [0] * len(start))
            self._contexts[request] = known
        for token_id in request.token_ids[known.num_read :]:
            known.text += self._target.bytes_of[token_id] if token_id < len(self._target.bytes_of) else b""
        known.num_read = len(request.token_ids)
        if _complete_utf8_len(known.text) < len(known.text):
            return None
        first = self._draft.retokenize_from(known.ids, len(start))
        offset = known.token_ends[first - 1] if first else 0
        tokens = self._draft.tokenize(bytes(known.text[offset:]), at_start=first == len(start))
        num_unchanged = first
        for old, (new, _) in zip(known.ids[first:], tokens, strict=False):
            if old != new:
                break
            num_unchanged += 1
        del known.ids[first:], known.token_ends[first:]
        for token_id, size in tokens:
            offset += size
            known.ids.append(token_id)
            known.token_ends.append(offset)
        return known.ids, num_unchanged

    def _target_ids(self, request: Request, draft_ids: Sequence[int]) -> list[int]:
        """Return the generated text as tokens of the target, without those of the request."""
        texts: list[bytes] = []
        for token_id in draft_ids:
            if token_id in self._draft.special_token_ids or token_id >= len(self._draft.bytes_of):
                break
            texts.append(self._draft.bytes_of[token_id])
        generated = b"".join(texts)
        generated = generated[: _complete_utf8_len(generated)]
        if not generated:
            return []
        first_token = _num_start_tokens(self._target, request)
        first = self._target.retokenize_from(request.token_ids, first_token)
        before = b"".join(self._target.bytes_of[token_id] for token_id in request.token_ids[first:])
        tokens: list[tuple[int, int]] = []
        end = -len(before)
        for token_id, size in self._target.tokenize(before + generated, at_start=first == first_token):
            start, end = end, end + size
            if start >= 0:
                tokens.append((token_id, size))
            elif end > 0:  # the last committed token would be tokenized differently together with the generated text
                tokens.extend(self._target.tokenize(generated[:end]))
        if len(tokens) > 1 and generated[-1:].isalnum() and tokens[-1][1] > len(texts[-1]):
            tokens.pop()  # the last word may be incomplete, so its last token is left out
        return [token_id for token_id, _ in tokens]


def _consecutive_as_slice(ids: IdMap) -> IdMap | slice:
    """Return consecutive ids as a slice: copying a range of a wide row is ten times as fast as indexing by ids."""
    if len(ids) and np.array_equal(ids, np.arange(ids[0], ids[0] + len(ids))):
        return slice(int(ids[0]), int(ids[0]) + len(ids))
    return ids


def _num_start_tokens(tokenizer: ByteTokenizer, request: Request) -> int:
    """Return the number of special tokens at the start of the request; another vocabulary has its own."""
    count = len(tokenizer.bos_ids)
    return count if tuple(request.token_ids[:count]) == tokenizer.bos_ids else 0


def _complete_utf8_len(text: bytes | bytearray) -> int:
    """Return the length of `text` without an incomplete character at its end."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - back if back < needed else len(text)
        if byte < 0x80:
            break
    return len(text)


def _characters(text: bytes) -> list[bytes]:
    """Return the characters of `text`; each invalid byte counts as a character."""
    return [character.encode("utf-8", "surrogateescape") for character in text.decode("utf-8", "surrogateescape")]
