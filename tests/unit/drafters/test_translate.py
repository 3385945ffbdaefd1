"""Tokens and text carried between a target and a draft model of another vocabulary."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import VOCAB_SIZE, write_byte_fallback_tokenizer, write_byte_level_tokenizer, write_checkpoint
from harness.loaded_targets import make_drafter
from harness.vocabulary_pairs import reorder_vocabulary
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.translate import ByteTokenizer, SharedVocabularyMap, TextDrafter
from paceline.kv_cache.cache import CachedSequence
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.drafter import DraftBudget, Drafter, DrafterTraits
from paceline.speculation.request import Request
from paceline.tokenizer.tokenizer import Tokenizer

TEXTS = ["the theory", " a cat", "thé 你好 the\n\tthe", "x😺y", "\n", "", "😺"]
GREEDY = SamplingParams()
FREE = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ByteTokenizer:
    return ByteTokenizer(Tokenizer.open(write_byte_level_tokenizer(tmp_path_factory.mktemp("byte-level"))))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> ByteTokenizer:
    return ByteTokenizer(Tokenizer.open(write_byte_fallback_tokenizer(tmp_path_factory.mktemp("byte-fallback"))))


@pytest.fixture(scope="module")
def mini(mini_dir: Path) -> ByteTokenizer:
    return ByteTokenizer(Tokenizer.open(mini_dir))


def make_request(token_ids: Sequence[int], vocab_size: int, params: SamplingParams = GREEDY) -> Request:
    processor = LogitsProcessor(params, vocab_size, token_ids)
    return Request(list(token_ids), len(token_ids), params, processor, CachedSequence(), seed=3, sample_index=0, max_len=10_000)


# Cutting bytes


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("at_start", [True, False])
def test_tokenizer_pieces_join_to_the_text(byte_level: ByteTokenizer, byte_fallback: ByteTokenizer, text: str, at_start: bool) -> None:
    for tokenizer in (byte_level, byte_fallback):
        cut = tokenizer.tokenize(text.encode(), at_start=at_start)
        assert sum(size for _, size in cut) == len(text.encode())
        joined = b"".join(tokenizer.token_bytes[token_id] for token_id, _ in cut)
        assert joined in (text.encode(), b" " + text.encode())
        if not at_start:
            assert joined == text.encode()


def test_incomplete_utf8_character_is_tokenized_as_bytes(byte_level: ByteTokenizer, byte_fallback: ByteTokenizer) -> None:
    half = "😺".encode()[:2]
    for tokenizer in (byte_level, byte_fallback):
        assert b"".join(tokenizer.token_bytes[token_id] for token_id, _ in tokenizer.tokenize(b"the" + half)) == b"the" + half


def test_byte_tokenizer_pieces_equal_those_of_the_tokenizer(mini: ByteTokenizer, mini_dir: Path) -> None:
    tokenizer = Tokenizer.open(mini_dir)
    text = 'Once upon a time, "there" was\n    return 12.5'
    assert [token_id for token_id, _ in mini.tokenize(text.encode())] == tokenizer.encode(text, add_special_tokens=False)


# Ids through shared pieces


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "t", "llama", num_hidden_layers=2, max_position_embeddings=256)


@pytest.fixture(scope="module")
def reordered(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network under shuffled ids."""
    order = np.random.default_rng(5).permutation(VOCAB_SIZE).tolist()
    return reorder_vocabulary(directory, tmp_path_factory.mktemp("reordered") / "d", order)


def open_drafter(draft: Path, target: Path, *, tree_width: int = 1) -> Drafter:
    drafter = make_drafter(str(draft), target, tree_width=tree_width)
    assert drafter is not None
    return drafter


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("params", [GREEDY, FREE], ids=["greedy", "sampled"])
def test_draft_model_with_reordered_ids_drafts_the_same_tokens(
    directory: Path, reordered: Path, params: SamplingParams, width: int
) -> None:
    """Sampled too: the noise is that of the target's ids."""
    own, other = open_drafter(directory, directory, tree_width=width), open_drafter(reordered, directory, tree_width=width)
    random = np.random.default_rng(1)
    request = make_request(random.integers(4, VOCAB_SIZE, 20).tolist(), VOCAB_SIZE, params)
    for _ in range(10):
        budget = [DraftBudget(4 * width + 1, 4)]
        (expected,), (found,) = own.propose([request], budget), other.propose([request], budget)
        assert expected is not None
        assert found == expected
        kept = int(random.integers(0, 5))
        for token in [*expected.token_ids[1 : 1 + kept], int(random.integers(4, VOCAB_SIZE))]:
            request.token_ids.append(token)
            request.processor.commit(token)
    for drafter in (own, other):
        drafter.release(request)


def test_only_shared_pieces_are_drafted_and_no_padding_ids(directory: Path, tmp_path: Path) -> None:
    known = [0, 1, 2, 3, *range(40, VOCAB_SIZE)]
    smaller = reorder_vocabulary(directory, tmp_path / "d", known[::-1])
    drafter = open_drafter(smaller, directory, tree_width=8)
    for params in (GREEDY, FREE):
        request = make_request([10, 50, 12, 60], VOCAB_SIZE, params)
        (tree,) = drafter.propose([request], [DraftBudget(64, 6)])
        assert tree is not None
        assert set(tree.token_ids[1:]) <= set(known)
        drafter.release(request)


def test_target_token_unknown_to_the_draft_model_is_spelled_in_its_pieces(byte_level: ByteTokenizer, byte_fallback: ByteTokenizer) -> None:
    translation = SharedVocabularyMap(
        byte_fallback, byte_level, vocab_size=len(byte_fallback.pieces), draft_vocab_size=len(byte_level.pieces)
    )
    ids = [byte_fallback.pieces.index(piece) for piece in ("▁the", "é", "你", "<0x41>", "t")]
    request = make_request(ids[:2], len(byte_fallback.pieces))
    assert b"".join(byte_level.token_bytes[token_id] for token_id in translation.draft_context(request)) == " theé".encode()
    request.token_ids.extend(ids[2:])
    context = translation.draft_context(request)
    assert b"".join(byte_level.token_bytes[token_id] for token_id in context) == " theé你At".encode()
    assert translation.draft_context(make_request(ids, len(byte_fallback.pieces))) == context, "as if read at once"


def test_draft_to_target_id_mapping_is_invertible(byte_level: ByteTokenizer, byte_fallback: ByteTokenizer) -> None:
    target_size, draft_size = len(byte_fallback.pieces), len(byte_level.pieces)
    translation = SharedVocabularyMap(byte_fallback, byte_level, vocab_size=target_size, draft_vocab_size=draft_size)
    for draft_id in range(draft_size):
        row = np.full(draft_size, -np.inf, np.float32)
        row[draft_id] = 1.0
        (drafted,) = np.nonzero(np.isfinite(translation.to_target_logits(row)))
        assert len(drafted) <= 1
        for token_id in drafted.tolist():
            assert translation.to_draft_id(token_id) == draft_id
            assert byte_fallback.token_bytes[token_id] == byte_level.token_bytes[draft_id]


# Text


class ScriptedWriter:
    """Generates given texts, cut into given ids, and records its calls."""

    name = "draft_model"
    traits = DrafterTraits("scripted")

    def __init__(self) -> None:
        self.answer: list[int] = []
        self.contexts: list[tuple[list[int], int]] = []

    def generate(
        self, requests: Sequence[Request], contexts: Sequence[tuple[Sequence[int], int]], max_new_tokens: Sequence[int]
    ) -> list[list[int]]:
        self.contexts = [(list(ids), num_unchanged) for ids, num_unchanged in contexts]
        return [self.answer] * len(contexts)

    def release(self, request: Request) -> None:
        self.answer = []


@pytest.fixture
def writer() -> ScriptedWriter:
    return ScriptedWriter()


def draft_ids(drafter: TextDrafter, request: Request, depth: int = 8) -> list[int] | None:
    (tree,) = drafter.propose([request], [DraftBudget(depth + 1, depth)])
    return None if tree is None else list(tree.token_ids[1:])


def test_draft_context_of_another_vocabulary_is_retokenized(
    mini: ByteTokenizer, byte_fallback: ByteTokenizer, writer: ScriptedWriter
) -> None:
    drafter = TextDrafter(writer, target=byte_fallback, draft=mini)
    text = "the cat sat there, and the dog ran! "
    ids = [token_id for token_id, _ in byte_fallback.tokenize(text.encode(), at_start=False)]
    request = make_request(ids[:1], len(byte_fallback.pieces))
    seen: list[int] = []
    for token_id in ids[1:]:
        request.token_ids.append(token_id)
        draft_ids(drafter, request)
        ((context, num_unchanged),) = writer.contexts
        assert context[:num_unchanged] == seen[:num_unchanged]
        seen = context
        written = b"".join(byte_fallback.token_bytes[token_id] for token_id in request.token_ids)
        assert b"".join(mini.token_bytes[token_id] for token_id in context) == written
        assert context == [token_id for token_id, _ in mini.tokenize(written)]


def test_no_draft_starts_within_a_multi_token_character(
    byte_level: ByteTokenizer, byte_fallback: ByteTokenizer, writer: ScriptedWriter
) -> None:
    drafter = TextDrafter(writer, target=byte_level, draft=byte_fallback)
    writer.answer = [byte_fallback.pieces.index("▁the")]
    ids = [token_id for token_id, _ in byte_level.tokenize("a😺".encode())]
    request = make_request(ids[:-1], len(byte_level.pieces))
    assert draft_ids(drafter, request) is None
    request.token_ids.append(ids[-1])
    assert draft_ids(drafter, request) is not None
    assert "😺".encode() == b"".join(byte_fallback.token_bytes[token_id] for token_id in writer.contexts[0][0])[-4:]


@pytest.mark.parametrize(
    ("before", "written", "expected"),
    [
        ("a", [" the"], [" the"]),
        ("a", [" th", "e", " "], [" the", " "]),
        ("a", [" ", "t", "h"], [" th"]),  # open as well, but all there is
        ("a", [" ", "t"], [" t"]),
        ("a b", [" ", "t", "h", "x"], [" th", "x"]),
        ("a b x", ["y", " ", "t", "h"], ["y"]),  # the word is open: the next token may be " the"
        ("a", ["!", " ", "t", "h", "!"], ["!", " th", "!"]),
        (" t", ["h", "e", "!"], ["h", "e", "!"]),  # what is committed stays as it is
    ],
)
def test_draft_text_is_retokenized_for_the_target(
    byte_level: ByteTokenizer, writer: ScriptedWriter, tmp_path: Path, before: str, written: list[str], expected: list[str]
) -> None:
    drafter = TextDrafter(writer, target=byte_level, draft=byte_level)
    writer.answer = [token_id for piece in written for token_id, _ in byte_level.tokenize(piece.encode())]
    request = make_request([token_id for token_id, _ in byte_level.tokenize(before.encode())], len(byte_level.pieces))
    found = draft_ids(drafter, request)
    assert [byte_level.token_bytes[token_id].decode() for token_id in found or ()] == expected


def test_special_tokens_end_a_translated_draft(byte_level: ByteTokenizer, writer: ScriptedWriter) -> None:
    drafter = TextDrafter(writer, target=byte_level, draft=byte_level)
    end = byte_level.pieces.index("<|endoftext|>")
    request = make_request([byte_level.pieces.index("a")], len(byte_level.pieces))
    writer.answer = [byte_level.pieces.index("b"), end, byte_level.pieces.index("c")]
    assert draft_ids(drafter, request) == [byte_level.pieces.index("b")]
    writer.answer = [end]
    assert draft_ids(drafter, request) is None


def test_bos_token_of_the_target_is_replaced_by_that_of_the_draft_model(
    mini: ByteTokenizer, shared_dir: Path, writer: ScriptedWriter
) -> None:
    stories = shared_dir / "data" / "models" / "TinyStories-656K"
    if not stories.is_dir():
        pytest.skip("no model with a start token")
    other = ByteTokenizer(Tokenizer.open(stories))
    assert (mini.bos_ids, other.bos_ids) == ((), (other.pieces.index("<|start_story|>"),))
    text = b"Once upon a time"
    ids = [token_id for token_id, _ in mini.tokenize(text)]
    draft_ids(TextDrafter(writer, target=mini, draft=other), make_request(ids, len(mini.pieces)))
    assert writer.contexts[0][0] == [*other.bos_ids, *(token_id for token_id, _ in other.tokenize(text, at_start=True))]
    draft_ids(TextDrafter(writer, target=other, draft=mini), make_request(writer.contexts[0][0], len(other.pieces)))
    assert b"".join(mini.token_bytes[token_id] for token_id in writer.contexts[0][0]) == b" " + text


def test_draft_model_with_a_disjoint_vocabulary_drafts_and_frees_blocks(mini_dir: Path, mini: ByteTokenizer, shared_dir: Path) -> None:
    stories = shared_dir / "data" / "models" / "TinyStories-656K"
    if not stories.is_dir():
        pytest.skip("no model of another vocabulary")
    drafter = open_drafter(stories, mini_dir)
    assert isinstance(drafter, TextDrafter)
    assert isinstance(drafter.model, DraftModelDrafter)
    assert "disjoint vocabularies: drafts are decoded and encoded again" in drafter.traits.description
    request = make_request(
        [token_id for token_id, _ in mini.tokenize(b"Once upon a time, there was a little girl named")], len(mini.pieces)
    )
    for word in (b" Lily", b".", b" She"):
        found = draft_any_ids(drafter, request)
        assert found
        request.token_ids.extend(token_id for token_id, _ in mini.tokenize(word))
    drafter.release(request)
    drafter.model.cache.check_consistency()
    assert drafter.model.cache.pool.num_free == drafter.model.cache.pool.num_blocks


def draft_any_ids(drafter: Drafter, request: Request) -> list[int]:
    (tree,) = drafter.propose([request], [DraftBudget(5, 4)])
    return [] if tree is None else list(tree.token_ids[1:])
