"""Draft models with another vocabulary than the target.

If most tokens exist in both vocabularies, the ids of equal tokens are mapped (`SharedVocabularyMap`). Otherwise the draft model generates
text, and the target's tokenizer turns it into draft tokens (`TextDrafter`). The target verifies the draft tokens as always.

Sources: Timor et al. 2025, arXiv:2502.05202, algorithm 4 (token-level intersection) and algorithm 2 (text-level). Deviation: draft tokens
of the intersection are drawn with the target's noise.
"""

from abc import abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from paceline.runtimes.base import FloatArray
from paceline.speculation.drafter import DraftBudget, Drafter, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import IdMap, Speller, match_ids, piece_bytes, pieces_of

NUM_RETOKENIZED_TOKENS = 10
"""How many of the last tokens are tokenized again when text is appended, because they may change."""


class ByteTokenizer:
    """Tokenizes bytes, and returns for each token how many bytes of the text it covers.

    Attributes:
        pieces, token_bytes: for each token id the token as written in the vocabulary file, and its bytes.
        bos_ids: special tokens that the tokenizer puts before a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces = pieces_of(tokenizer)
        self.token_bytes = piece_bytes(self.pieces)
        self.special_token_ids = tokenizer.special_token_ids
        self._encode = tokenizer.encode
        self._speller = Speller(self.pieces)
        self.bos_ids = tuple(takewhile(self.special_token_ids.__contains__, tokenizer.encode("a")))
        self._adds_space = self._join_bytes(tokenizer.encode("a", add_special_tokens=False)) == b" a"

    def tokenize(self, text: bytes, *, at_start: bool = False) -> list[tuple[int, int]]:
        """Return the token ids of `text`, each with the number of bytes that it covers.

        The tokenizer's ids are used if their bytes are `text`. Otherwise, as for invalid UTF-8, `text` is divided from the left into the
        longest tokens. Bytes that no token has are added to the size of the token before them.

        Args:
            at_start: `text` is the beginning of a text, where some tokenizers add a space.
        """
        tokens_of_text = self._tokenize_as_text(text, at_start=at_start)
        if tokens_of_text is not None:
            return tokens_of_text
        tokens: list[tuple[int, int]] = []
        whole = self._speller.spell(text)
        for part, ids in [(text, whole)] if whole is not None else [(part, self._speller.spell(part)) for part in _characters(text)]:
            if ids is not None:
                tokens.extend((token_id, len(self.token_bytes[token_id])) for token_id in ids)
            elif tokens:
                tokens[-1] = (tokens[-1][0], tokens[-1][1] + len(part))
        return tokens

    def retokenization_start(self, token_ids: Sequence[int], first: int) -> int:
        """Return the index, at least `first`, from which to tokenize again when text is appended: near the end, at a space if possible."""
        index = max(first, len(token_ids) - NUM_RETOKENIZED_TOKENS)
        min_index = max(first, len(token_ids) - 4 * NUM_RETOKENIZED_TOKENS)
        while index > min_index and not self.token_bytes[token_ids[index]].startswith(b" "):
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
        if self._join_bytes(ids) != expected:
            return None
        sizes = [len(self.token_bytes[token_id]) for token_id in ids]
        if sizes:
            sizes[0] -= len(expected) - len(text)
        return list(zip(ids, sizes, strict=True))

    def _join_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.token_bytes[token_id] for token_id in ids if token_id < len(self.token_bytes))


class SharedVocabularyMap:
    """Maps ids of the draft model to ids of the target by the tokens that both vocabularies have. Other tokens are never drafted.

    Args:
        target, draft: tokenizers of the target and of the draft model.
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
        is_mutual = self._to_draft[target_ids] == draft_ids  # a vocabulary may contain a token twice: only one-to-one pairs are kept
        draft_ids, target_ids = draft_ids[is_mutual], target_ids[is_mutual]
        self._shared_draft_ids, self._shared_target_ids = _consecutive_as_slice(draft_ids), _consecutive_as_slice(target_ids)
        self._to_draft[self._to_draft >= draft_vocab_size] = -1
        self._converted: dict[int, tuple[int, ...]] = {}
        self._contexts = RequestState[tuple[list[int], int]]()

    def draft_context(self, request: Request) -> Sequence[int]:
        """Return the request's text as ids of the draft model. Later calls only append ids."""
        ids, num_read = self._contexts.get(request) or (list(self._draft.bos_ids), _num_start_tokens(self._target, request))
        for token_id in request.token_ids[num_read:]:
            ids.extend(self._to_draft_ids(token_id))
        self._contexts[request] = ids, len(request.token_ids)
        return ids

    def to_target_logits(self, row: FloatArray) -> FloatArray:
        """Convert logits of the draft model to a row [V] of the target's ids; ids that cannot be drafted get -inf."""
        scores = np.full(self._vocab_size, -np.inf, np.float32)
        scores[self._shared_target_ids] = row[self._shared_draft_ids]
        return scores

    def to_draft_id(self, token_id: int) -> int:
        """Return the draft model's id of a token that both vocabularies have, given the target's id."""
        return int(self._to_draft[token_id])

    def _to_draft_ids(self, token_id: int) -> tuple[int, ...]:
        mapped = int(self._to_draft[token_id]) if token_id < len(self._to_draft) else -1
        if mapped >= 0:
            return (mapped,)
        if token_id not in self._converted:
            text = self._target.token_bytes[token_id] if token_id < len(self._target.token_bytes) else b""
            self._converted[token_id] = tuple(draft_id for draft_id, _ in self._draft.tokenize(text))
        return self._converted[token_id]


class GreedyTextModel(Drafter):
    """A draft model that can also generate text greedily."""

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], contexts: Sequence[tuple[Sequence[int], int]], max_new_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Continue each context greedily; return the generated token ids, none if the text is too long or the cache is full.

        Args:
            contexts: for each request its text as ids of the draft model, and how many of the first ids are the same as in the last call.
            max_new_tokens: number of tokens to generate for each request.
        """


@dataclass(slots=True)
class _RetokenizedContext:
    """One request's text, tokenized for the draft model."""

    num_converted_tokens: int  # number of the request's tokens whose bytes were appended to `text` so far
    draft_ids: list[int]  # the text as ids of the draft model
    token_end_bytes: list[int]  # for each of `draft_ids` the byte offset in `text` after its token
    text: bytearray = field(default_factory=bytearray)  # bytes of the request's tokens


class TextDrafter(Drafter):
    """Drafts with a model of any vocabulary: the target's tokenizer tokenizes the text that the model generates greedily.

    If the generated text may end inside a word, the last draft token is dropped, because the whole word may have other tokens.
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
        contexts = {i: context for i, depth in enumerate(depths) if depth > 0 and (context := self._draft_context(requests[i])) is not None}
        texts = self.model.generate([requests[i] for i in contexts], list(contexts.values()), [depths[i] for i in contexts])
        for index, draft_ids in zip(contexts, texts, strict=True):
            token_ids = self._tokenize_for_target(requests[index], draft_ids)[: depths[index]]
            if token_ids:
                trees[index] = DraftTree.chain(requests[index].token_ids[-1], token_ids, self.name)
        return trees

    def prefill_s(self, request: Request) -> float:
        return self.model.prefill_s(request)

    def release(self, request: Request) -> None:
        self.model.release(request)

    def _draft_context(self, request: Request) -> tuple[Sequence[int], int] | None:
        """Return the text as draft-model ids, and how many of the first are as in the last call; None if it ends inside a character."""
        bos_ids = self._draft.bos_ids
        context = self._contexts.get(request)
        if context is None:
            context = _RetokenizedContext(_num_start_tokens(self._target, request), list(bos_ids), [0] * len(bos_ids))
            self._contexts[request] = context
        for token_id in request.token_ids[context.num_converted_tokens :]:
            context.text += self._target.token_bytes[token_id] if token_id < len(self._target.token_bytes) else b""
        context.num_converted_tokens = len(request.token_ids)
        if _complete_utf8_len(context.text) < len(context.text):
            return None
        first = self._draft.retokenization_start(context.draft_ids, len(bos_ids))
        offset = context.token_end_bytes[first - 1] if first else 0
        tokens = self._draft.tokenize(bytes(context.text[offset:]), at_start=first == len(bos_ids))
        num_unchanged_tokens = first
        for old_id, (new_id, _) in zip(context.draft_ids[first:], tokens, strict=False):
            if old_id != new_id:
                break
            num_unchanged_tokens += 1
        del context.draft_ids[first:], context.token_end_bytes[first:]
        for token_id, size in tokens:
            offset += size
            context.draft_ids.append(token_id)
            context.token_end_bytes.append(offset)
        return context.draft_ids, num_unchanged_tokens

    def _tokenize_for_target(self, request: Request, draft_ids: Sequence[int]) -> list[int]:
        """Convert the draft model's generated `draft_ids` to token ids of the target."""
        texts: list[bytes] = []
        for token_id in draft_ids:
            if token_id in self._draft.special_token_ids or token_id >= len(self._draft.token_bytes):
                break
            texts.append(self._draft.token_bytes[token_id])
        generated = b"".join(texts)
        generated = generated[: _complete_utf8_len(generated)]
        if not generated:
            return []
        first_token = _num_start_tokens(self._target, request)
        first = self._target.retokenization_start(request.token_ids, first_token)
        before = b"".join(self._target.token_bytes[token_id] for token_id in request.token_ids[first:])
        tokens: list[tuple[int, int]] = []
        end = -len(before)
        for token_id, size in self._target.tokenize(before + generated, at_start=first == first_token):
            start, end = end, end + size
            if start >= 0:
                tokens.append((token_id, size))
            elif end > 0:  # this token also covers committed text: tokenize the generated part alone
                tokens.extend(self._target.tokenize(generated[:end]))
        if len(tokens) > 1 and generated[-1:].isalnum() and tokens[-1][1] > len(texts[-1]):
            tokens.pop()  # the last token is dropped because its word may be incomplete
        return [token_id for token_id, _ in tokens]


def _consecutive_as_slice(ids: IdMap) -> IdMap | slice:
    """Return consecutive ids as a slice, with which copying from a row of logits is ten times as fast; other ids unchanged."""
    if len(ids) and np.array_equal(ids, np.arange(ids[0], ids[0] + len(ids))):
        return slice(int(ids[0]), int(ids[0]) + len(ids))
    return ids


def _num_start_tokens(tokenizer: ByteTokenizer, request: Request) -> int:
    """Return how many special tokens the request begins with. They are skipped, because the draft model has its own."""
    count = len(tokenizer.bos_ids)
    return count if tuple(request.token_ids[:count]) == tokenizer.bos_ids else 0


def _complete_utf8_len(text: bytes | bytearray) -> int:
    """Return the length of UTF-8 `text` without an incomplete character at its end."""
    decoder = getincrementaldecoder("utf-8")("ignore")
    decoder.decode(text[-4:])
    return len(text) - len(decoder.getstate()[0])  # the state contains the bytes of an incomplete character


def _characters(text: bytes) -> list[bytes]:
    """Return the UTF-8 characters of `text` as bytes; each invalid byte is returned as a character."""
    return [character.encode("utf-8", "surrogateescape") for character in text.decode("utf-8", "surrogateescape")]
