"""Masks are those of a matcher that only ever saw the text itself, wherever paths led before, and whatever breaks on the way."""

import builtins
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from harness.grammar_schemas import random_schema
from paceline.errors import BackendUnavailableError, RequestError
from paceline.installation import install_command
from paceline.sampling.grammars.compiled_grammar import CompiledGrammar
from paceline.sampling.grammars.compiler import GrammarCompiler
from paceline.sampling.grammars.grammar import Grammar
from paceline.sampling.grammars.matcher import GrammarMatcher
from paceline.tokenizer.tokenizer import Tokenizer

MINI = Path(__file__).resolve().parents[4] / "src" / "paceline" / "assets" / "mini" / "target"
EOS_IDS = (2, 0)
V = 4096
GRAMMARS = {
    "object": Grammar.json_object(),
    "laid out": Grammar.json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "xy"]}}, "required": ["a"]}, any_whitespace=True
    ),
    "regex": Grammar.regex(r"(ab|a)*c[0-9]{2,4}( the end| the ending)?"),
    "open regex": Grammar.regex("[a-z ]+"),
    "empty or more": Grammar.regex("(ha )*"),
    "lark": Grammar.lark('start: item+\nitem: NAME "=" (NUMBER | "(" start ")") ";"\nNAME: /[a-z]+/\nNUMBER: /[0-9]+/\n'),
    "choice": Grammar.choice(["yes", "yesterday", "no", 'say "no"', "line\nbreak", "\\d", "100%", "é😀"]),
    "reasoning": Grammar.choice(["blue", "bluer"], reasoning_end="</think>"),
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MINI)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), EOS_IDS)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def allowed(matcher: GrammarMatcher, path: Sequence[int] = (), width: int = V) -> list[int]:
    """Ids that the mask leaves; those it leaves keep their score."""
    scores = np.arange(width, dtype=np.float32)
    matcher.mask(scores, path)
    left = np.flatnonzero(scores > -np.inf)
    assert (scores[left] == left).all()
    return left.tolist()


def write(compiler: GrammarCompiler, grammar: Grammar, token_ids: Sequence[int]) -> GrammarMatcher:
    """Return a matcher after these tokens, each of which its mask allowed."""
    matcher = compiler.new_matcher(grammar)
    for token_id in token_ids:
        assert token_id in allowed(matcher)
        matcher.commit(token_id)
    return matcher


def random_text(grammar: Grammar, generator: np.random.Generator, length: int) -> tuple[list[int], list[list[int]]]:
    """A random allowed text, and what was allowed at each of its places, by a matcher that goes straight on."""
    matcher, text, masks = compiler().new_matcher(grammar), [], []
    while len(text) < length and not matcher.is_finished():
        masks.append(allowed(matcher))
        token = int(generator.choice(masks[-1]))
        if grammar.reasoning_end and len(text) == 3:
            token = ids(grammar.reasoning_end)[0]
        matcher.commit(token)
        text.append(token)
    return text, masks


def wander(matcher: GrammarMatcher, right: Sequence[int], generator: np.random.Generator) -> None:
    """Look at paths: right ones, ones that go wrong, ids that do not exist, ends."""
    for _ in range(int(generator.integers(4))):
        path = list(right[: generator.integers(6)])
        for _ in range(int(generator.integers(3))):
            path.append(int(generator.choice([generator.integers(V), *EOS_IDS, V + 7, -1, 2**40])))
        match int(generator.integers(3)):
            case 0:
                matcher.mask(np.zeros(V, np.float32), path)
            case 1:
                assert matcher.is_allowed(path) == (matcher.num_allowed_tokens(path) == len(path))
            case _:
                matcher.forced_tokens(path)


@pytest.mark.parametrize("name", [*GRAMMARS, "schemas"])
def test_grammar_mask_ignores_earlier_queries(name: str, seed: int, large_counts: bool, tally: Any) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(60 if large_counts else 6):
        grammar = GRAMMARS.get(name) or Grammar.json_schema(random_schema(generator))
        text, masks = random_text(grammar, generator, 30)
        matcher = compiler().new_matcher(grammar)
        for place, right in enumerate(masks):
            wander(matcher, text[place:], generator)
            ahead = int(generator.integers(min(4, len(masks) - place)))
            if ahead:  # an end token, where there is one, is the last of the text
                assert allowed(matcher, text[place : place + ahead]) == masks[place + ahead]
            assert allowed(matcher) == right
            matcher.commit(text[place])
            tally["masks compared"] += 1


@pytest.mark.parametrize("name", [*GRAMMARS, "schemas"])
def test_grammar_mask_agrees_with_is_allowed_and_forced_tokens(name: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    num_forced = 0
    for _ in range(6):
        grammar = GRAMMARS.get(name) or Grammar.json_schema(random_schema(generator))
        text, masks = random_text(grammar, generator, 30)
        matcher = compiler().new_matcher(grammar)
        for place, left in enumerate(masks):
            path = text[:place]
            assert matcher.is_allowed([*path, int(generator.choice(left))])
            assert [token in left for token in EOS_IDS] == [matcher.is_allowed([*path, token]) for token in EOS_IDS]
            forced = matcher.forced_tokens(path)
            if forced:
                assert left == forced[:1]
                assert matcher.is_allowed([*path, *forced])
                num_forced += len(forced)
            for token in generator.integers(3, V, 20).tolist():
                if not matcher.is_allowed([*path, token]):
                    assert token not in left
    assert num_forced > 0 or name not in ("regex", "choice", "schemas")


def test_forced_grammar_tokens_are_the_canonical_tokenization() -> None:
    schema = {"type": "object", "properties": {"street address": {"const": 7}}, "required": ["street address"]}
    schema["additionalProperties"] = False
    matcher = compiler().new_matcher(Grammar.json_schema(schema))
    text = ids('{"street address": 7}')
    assert matcher.forced_tokens(()) == text
    assert matcher.forced_tokens(text[:2]) == text[2:]
    assert matcher.is_allowed(ids("{") + ids('"') + ids("s"))  # other spellings of the text are no errors, only not allowed by the mask
    assert allowed(matcher, text[:2]) == [text[2]]


def test_finished_grammar_allows_only_end_tokens() -> None:
    matcher = write(compiler(), GRAMMARS["choice"], ids("no"))
    assert allowed(matcher) == sorted(EOS_IDS)
    assert matcher.forced_tokens(()) == []
    assert not matcher.is_finished()
    for end in EOS_IDS:
        assert matcher.num_allowed_tokens([end, end]) == 1
        assert allowed(matcher, [end]) == sorted(EOS_IDS)  # with ignore_eos only end tokens follow
    assert allowed(matcher) == sorted(EOS_IDS)
    matcher.commit(EOS_IDS[0])
    assert matcher.is_finished()
    assert matcher.num_allowed_tokens([5]) == 0
    assert allowed(matcher) == sorted(EOS_IDS)


@pytest.mark.parametrize("end", EOS_IDS)
def test_end_token_on_a_draft_path_can_be_rolled_back(end: int) -> None:
    """llguidance does not count an end token after a complete text, so its rollback would undo one token too many."""
    text = ids("yesterday")
    matcher = write(compiler(), GRAMMARS["choice"], text[:1])
    for path in ([*text[1:], end], text[1:], [end], [*text[1:], end, end], []):
        matcher.mask(np.zeros(V, np.float32), path)
        assert matcher.is_allowed([*text[1:], end])
    assert allowed(matcher, text[1:]) == sorted(EOS_IDS)


def test_grammar_without_end_tokens_is_finished_at_its_last_token() -> None:
    matcher = GrammarCompiler(tokenizer()).new_matcher(Grammar.regex("no[0-9]?"))
    for token in ids("no1"):
        assert not matcher.is_finished()
        assert token in allowed(matcher, width=V + 100)
        matcher.commit(token)
    assert matcher.is_finished()
    assert allowed(matcher, width=V + 100) == []
    free = [token for token in allowed(compiler().new_matcher(Grammar.lark("start: /.+/"))) if token not in EOS_IDS]
    assert allowed(GrammarCompiler(tokenizer()).new_matcher(Grammar.lark("start: /.+/")), width=V + 100) == free


@pytest.mark.parametrize("width", [V - 96, V, V + 200])
def test_grammar_masks_rows_wider_or_narrower_than_the_vocabulary(width: int) -> None:
    """A model may have more rows than its tokenizer has ids, or fewer."""
    matcher = compiler().new_matcher(GRAMMARS["open regex"])
    assert allowed(matcher, width=width) == [token for token in allowed(matcher) if token < width]


def test_committing_a_token_against_the_grammar_is_an_error() -> None:
    matcher = write(compiler(), GRAMMARS["choice"], ids("no"))
    with pytest.raises(RequestError, match=r"no token of this model continues the output after \d tokens \(b'x' does not match\)"):
        matcher.commit(ids("x")[0])


NEVER = {
    "(": "unclosed group",
    r"[^\x00-\x{10FFFF}]": "no text matches it",
    "(?=a)b": "look-around",
}


@pytest.mark.parametrize("pattern", NEVER)
def test_regex_that_matches_nothing_is_refused_with_the_reason(pattern: str) -> None:
    with pytest.raises(RequestError, match=NEVER[pattern]) as refusal:
        compiler().new_matcher(Grammar.regex(pattern))
    assert refusal.value.parameter == "grammar"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"not": {"pattern": "x"}}, "`not` at # cannot be enforced"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum .* is greater than maximum"),
        ({"$ref": "#/nowhere"}, "does not exist"),
        ({"oneOf": [{"minLength": 2}, {"maxLength": 3}]}, "`oneOf` cannot be enforced .* use `anyOf`"),
        ({"x-guidance": {"colour": "red"}}, "unknown field"),
    ],
)
def test_json_schema_that_does_not_compile_is_refused_with_the_reason(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refusal:
        compiler().new_matcher(Grammar.json_schema(schema))
    assert refusal.value.parameter == "grammar"


@pytest.mark.parametrize("text", ["start: nothing", "start: again\nagain: again", "start: " + "(" * 5000, 'start: "a'])
def test_invalid_lark_grammar_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refusal:
        compiler().new_matcher(Grammar.lark(text))
    assert refusal.value.parameter == "grammar"


# What llguidance does badly under long use: the automaton of a grammar is shared by all its matchers and only grows.

LONG = {"type": "string", "pattern": "^([a-m]{1,4}[0-9]{1,3}|[k-z]{2,5}-|#[0-9a-f]{2,6}!){1,20}$", "maxLength": 200}
WIDE = Grammar.json_schema({"type": "object", "properties": {"a": LONG}, "required": ["a"], "additionalProperties": False})


def test_grammar_limits_are_not_used_up_by_other_requests(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit that one text is far from, and many together pass."""
    generator = np.random.default_rng(seed)
    crowded = GrammarCompiler(tokenizer(), EOS_IDS, limits={"max_lexer_states": 80})
    crowded.new_matcher(WIDE)
    compiler().new_matcher(WIDE)
    compiled_again: list[object] = []
    real = CompiledGrammar._compile
    monkeypatch.setattr(CompiledGrammar, "_compile", lambda self: compiled_again.append(self) or real(self))
    for _ in range(12):
        matcher, alone = crowded.new_matcher(WIDE), compiler().new_matcher(WIDE)
        for _ in range(16):
            path = []
            for _ in range(4):
                right = allowed(alone, path)
                assert allowed(matcher, path) == right
                path.append(int(generator.choice(right)))
            for one in (matcher, alone):
                one.commit(path[0])
    assert len(compiled_again) > 2


def test_draft_too_complex_for_llguidance_is_only_not_allowed() -> None:
    ambiguous = Grammar.lark('start: start start | "a"')
    tight = GrammarCompiler(tokenizer(), EOS_IDS, limits={"max_items_in_row": 20}).new_matcher(ambiguous)
    free = compiler().new_matcher(ambiguous)
    (letter,) = ids("a")
    for _ in range(4):
        with pytest.raises(RequestError, match="Current row has"):
            tight.is_allowed([letter] * 12)
        assert tight.is_allowed([letter] * 3)
        with pytest.raises(RequestError, match="Current row has"):
            tight.mask(np.zeros(V, np.float32), [letter] * 12)
        assert allowed(tight) == allowed(free)
        with pytest.raises(RequestError, match="Current row has"):
            tight.is_allowed([letter] * 12)
        for one in (tight, free):
            one.commit(letter)


def test_grammar_limit_error_of_the_own_text_does_not_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling again would not help, and it would delay the whole batch."""
    ambiguous = Grammar.lark('start: start start | "a"')
    tight = GrammarCompiler(tokenizer(), EOS_IDS, limits={"max_items_in_row": 20})
    tight.new_matcher(ambiguous)
    monkeypatch.setattr(CompiledGrammar, "_compile", lambda _: pytest.fail("it compiles the grammar again"))
    with pytest.raises(RequestError, match="Current row has"):
        write(tight, ambiguous, ids("a") * 12)


def test_grammar_too_complex_for_its_text_is_a_request_error() -> None:
    tight = GrammarCompiler(tokenizer(), EOS_IDS, limits={"max_lexer_states": 40})
    with pytest.raises(RequestError, match="too many states") as refusal:
        write(tight, WIDE, ids('{"a": "abc12xyz-#00ff!'))
    assert refusal.value.parameter == "grammar"


def test_compiled_grammar_cache_evicts_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = CompiledGrammar.__init__

    def counted(self: CompiledGrammar, grammar: Grammar, *rest: Any) -> None:
        compiled.append(grammar.text)
        real(self, grammar, *rest)

    monkeypatch.setattr(CompiledGrammar, "__init__", counted)
    monkeypatch.setattr("paceline.sampling.grammars.compiler._MAX_CACHED_GRAMMARS", 2)
    small = GrammarCompiler(tokenizer(), EOS_IDS)
    for text in ("a", "b", "a", "c", "a", "b"):
        small.new_matcher(Grammar.regex(text))
    assert compiled == ["a", "b", "c", "b"]


def test_matchers_of_one_compiled_grammar_are_independent() -> None:
    one, other = (compiler().new_matcher(GRAMMARS["choice"]) for _ in range(2))
    one.commit(ids("no")[0])
    assert allowed(one) == sorted(EOS_IDS)
    assert ids("yes")[0] in allowed(other)


def test_grammar_without_llguidance_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "llguidance":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BackendUnavailableError, match=re.escape(install_command("grammar"))):
        GrammarCompiler(tokenizer(), EOS_IDS).new_matcher(GRAMMARS["choice"])


# Reasoning


@pytest.mark.parametrize("thought", ["", "so it is ", "a < b </th ink> </think </", "\n\n"])
@pytest.mark.parametrize("spelling", ["whole", "bytewise"])
def test_grammar_applies_after_the_end_of_reasoning(thought: str, spelling: str) -> None:
    """Wherever a window begins and ends, and however the marker is cut into tokens."""
    marker = ids("</think>") if spelling == "whole" else [token for letter in "</think>" for token in ids(letter)]
    text = [*ids(thought), *marker, *ids("blue")]
    first = len(text) - len(ids("blue"))
    free = sorted(set(range(V)) - set(EOS_IDS))
    matcher = compiler().new_matcher(GRAMMARS["reasoning"])
    choices = allowed(compiler().new_matcher(Grammar.choice(["blue", "bluer"])))
    for start in range(len(text)):
        for end in range(start, len(text)):
            left = allowed(matcher, text[start:end])
            assert left == (free if end < first else choices) or end > first
            assert matcher.is_allowed([*text[start:end], *EOS_IDS[:1]]) == (end > first and EOS_IDS[0] in left)
        assert matcher.num_allowed_tokens([*text[start:], 3]) >= len(text) - start
        assert matcher.num_allowed_tokens([*text[start:first], ids("x")[0], 3]) == max(0, first - start)
        assert matcher.forced_tokens(text[start : max(start, first - 1)]) == [] or start >= first
        matcher.commit(text[start])
    assert EOS_IDS[0] in allowed(matcher)


def test_text_after_the_end_marker_within_its_token_is_unconstrained() -> None:
    both = Grammar.choice(["yes"], reasoning_end="a")
    token = ids(" at")[0]
    assert tokenizer().decode([token]) == " at"
    matcher = compiler().new_matcher(both)
    assert allowed(matcher, [token]) == allowed(compiler().new_matcher(Grammar.choice(["yes"])))


@pytest.mark.parametrize(("prompt", "is_over"), [("<think>\n\n</think>\n\n", True), ("</think> answer <think>", False), ("", False)])
def test_prompt_that_ends_reasoning_starts_the_grammar(prompt: str, is_over: bool) -> None:
    matcher = compiler().new_matcher(GRAMMARS["reasoning"], ids(prompt))
    assert (len(allowed(matcher)) < 10) == is_over


# Other tokenizers, and what the texts are worth


def test_random_text_allowed_by_a_json_schema_validates(seed: int, large_counts: bool) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(200 if large_counts else 20):
        schema = random_schema(generator)
        matcher, text = compiler().new_matcher(Grammar.json_schema(schema)), []
        while not matcher.is_finished() and len(text) < 400:
            left = allowed(matcher)
            short = [token for token in left if token in EOS_IDS or len(tokenizer().decode([token])) < 4]
            token = int(generator.choice(short or left))
            matcher.commit(token)
            text.append(token)
        assert matcher.is_finished(), schema
        jsonschema.validate(json.loads(tokenizer().decode(text)), schema)


def test_grammar_works_with_the_vocabulary_of_a_gguf_file(shared_dir: Path) -> None:
    """Byte-level and sentencepiece."""
    for name in ("llama-spm", "gpt-2"):
        other = Tokenizer.open(shared_dir / "data" / "tokenizers" / "ggml-vocab" / f"ggml-vocab-{name}.gguf")
        matcher = GrammarCompiler(other, other.end_token_ids).new_matcher(Grammar.choice(["größer", "größte"]))
        text: list[int] = []
        while not matcher.is_finished():
            left = allowed(matcher, width=other.vocab_size + 64)
            assert max(left) < other.vocab_size
            text.append(max(left, key=lambda token: len(other.piece(token))))
            matcher.commit(text[-1])
        assert other.decode(text).strip() in ("größer", "größte")
        assert text[-1] in other.end_token_ids
