"""Under a grammar, any tree gives the tokens of plain constrained decoding; what it forbids costs no row, what it forces no guess."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from harness.grammar_schemas import random_schema
from paceline.errors import RequestError
from paceline.kv_cache.cache import CachedSequence
from paceline.kv_cache.row_plan import is_chain
from paceline.sampling.grammars.compiler import GrammarCompiler
from paceline.sampling.grammars.grammar import Grammar
from paceline.sampling.grammars.matcher import GrammarMatcher
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.sampling.residual import TokenProbs
from paceline.speculation.commit import commit
from paceline.speculation.constrained import FORCED_SOURCE, constrain_tree
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import verify
from paceline.tokenizer.tokenizer import Tokenizer

MINI = Path(__file__).resolve().parents[3] / "src" / "paceline" / "assets" / "mini" / "target"
EOS_IDS = (2, 0)
V = 4096
PROMPT = (77, 1234, 9)
PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Adam", "Eve"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
SENTENCE = "[A-Z][a-z ]{60,90}[.!?]"
REASONING_END = "</think>"
Propose = Callable[[Request], DraftTree | None]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MINI)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), EOS_IDS)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class Target:
    """Random logits that depend on the place and the last two tokens, with texts it would rather write."""

    script: int
    wishes: tuple[int, ...] = ()

    def logits(self, text: Sequence[int]) -> NDArray[np.float32]:
        row = np.random.default_rng([self.script, len(text), *text[-2:]]).normal(0.0, 2.0, V).astype(np.float32)
        place = len(text) - len(PROMPT)
        if place < len(self.wishes):
            row[self.wishes[place]] += 40.0
        return row


def request(params: SamplingParams, seed: int = 1) -> Request:
    grammar = None if params.grammar is None else compiler().new_matcher(params.grammar, PROMPT)
    processor = LogitsProcessor(params, V, PROMPT, EOS_IDS, grammar=grammar)
    made = Request(list(PROMPT), len(PROMPT), params, processor, CachedSequence(), seed, 0, len(PROMPT) + params.max_tokens)
    made.end_token_ids = frozenset(EOS_IDS)
    return made


def generate(target: Target, one: Request, propose: Propose = lambda _: None) -> list[int]:
    """What the engine does, with a target that answers row by row."""
    while not one.is_finished:
        tree = propose(one) or DraftTree.root_only(one.token_ids[-1])
        paths: list[list[int]] = [[]]
        for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
            paths.append([*paths[parent], token])
        logits = np.stack([target.logits([*one.token_ids, *path]) for path in paths])
        result = verify(tree, logits, one)
        drafted = tree.num_draft_tokens > 0
        num_emitted = commit(one, result.token_ids, len(result.accepted_nodes), has_draft=drafted)
        one.stats.record(tree.depths[1:], min(num_emitted, len(result.accepted_nodes)), num_emitted, None)
    return list(one.output_token_ids)


def possible_after(one: Request, path: Sequence[int]) -> list[int]:
    """Some tokens the grammar allows."""
    scores = np.zeros(V, np.float32)
    matcher = one.processor.grammar
    assert matcher is not None
    matcher.mask(scores, path)
    return np.flatnonzero(scores > -np.inf)[:5].tolist()


def guess(generator: np.random.Generator, one: Request, right: Sequence[int]) -> DraftTree | None:
    """A random tree, right in places; now and then nothing."""
    right = right[one.num_output_tokens :]
    tokens: list[int] = []
    parents: list[int] = []
    on_path, depth = 0, 0
    for node in range(1, int(generator.integers(1, 10))):
        if generator.random() < 0.6 and depth < len(right):
            tokens.append(right[depth])
            parents.append(on_path)
            on_path, depth = node, depth + 1
        else:
            parents.append(int(generator.integers(node)))
            path, parent = [], parents[-1]
            while parent:
                path.insert(0, tokens[parent - 1])
                parent = parents[parent - 1]
            possible = possible_after(one, path) if generator.random() < 0.7 else []
            tokens.append(int(generator.choice([*possible, generator.integers(V), *EOS_IDS, V + 3])))
    return DraftTree.from_nodes(one.token_ids[-1], tokens, parents, "oracle") if tokens else None


def check(tree: DraftTree | None, one: Request, max_depth: int, max_rows: int) -> None:
    """A tree that obeys grammar and budget."""
    if tree is None:
        return
    tree.check()
    assert tree.num_draft_tokens >= 1
    assert tree.tree_depth <= max_depth
    assert len(tree.parents) <= max_rows
    matcher = one.processor.grammar
    assert matcher is not None
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        scores = np.zeros(V, np.float32)
        matcher.mask(scores, paths[parent])
        assert scores[token] == 0.0
        paths.append((*paths[parent], token))


SAMPLINGS = {"greedy": {}, "sampled": {"temperature": 1.0}, "top-p": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tree_under_a_grammar_gives_the_tokens_of_plain_decoding(
    sampling: str, seed: int, large_counts: bool, tally: "Counter[str]"
) -> None:
    generator = np.random.default_rng(seed)
    num_accepted = num_finished = num_branched = 0
    count = 150 if large_counts else 12
    for case in range(count):
        schema = random_schema(generator)
        grammar = Grammar.json_schema(schema) if case % 3 else Grammar.regex(SENTENCE)
        params = SamplingParams(max_tokens=60, grammar=grammar, **SAMPLINGS[sampling])
        target = Target(case)
        plain = generate(target, request(params))

        def propose(one: Request, plain: list[int] = plain) -> DraftTree | None:
            max_depth, max_rows = min(6, one.num_remaining_tokens - 1), int(generator.integers(1, 14))
            tree = constrain_tree(guess(generator, one, plain), one, max_depth, max_rows)
            check(tree, one, max_depth, max_rows)
            nonlocal num_branched
            num_branched += tree is not None and not is_chain(tree.parents)
            return tree

        one = request(params)
        assert generate(target, one, propose) == plain
        num_accepted += one.stats.num_accepted_tokens
        tally["token ids compared with plain constrained decoding"] += len(plain)
        if plain[-1] in EOS_IDS:
            text = tokenizer().decode(plain)
            if case % 3:
                jsonschema.validate(json.loads(text), schema)
            else:
                assert re.fullmatch(SENTENCE, text)
            num_finished += 1
        else:
            assert compiler().new_matcher(grammar).is_allowed(plain)
    assert num_accepted > 4 * count
    assert num_branched > count / 3
    assert num_finished > count / 3


def started(grammar: Grammar, text: str = "") -> Request:
    one = request(SamplingParams(max_tokens=50, grammar=grammar))
    for token in ids(text):
        commit(one, [token], 0, has_draft=False)
    return one


def spelled(tree: DraftTree | None) -> list[str]:
    """Every node by the text that leads to it, and who guessed it."""
    assert tree is not None
    texts = [""]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        texts.append(texts[parent] + tokenizer().decode([token]))
    return [f"{text} {source}" for text, source in zip(texts[1:], tree.sources[1:], strict=True)]


def chain(one: Request, text: str) -> DraftTree:
    return DraftTree.chain(one.token_ids[-1], ids(text), "ngram")


def test_forced_grammar_tokens_are_drafted_without_a_drafter() -> None:
    one = started(PERSON)
    tree = constrain_tree(None, one, 20, 20)
    assert spelled(tree) == ["{ grammar", '{" grammar', '{"name grammar', '{"name": grammar', '{"name": " grammar']
    assert spelled(constrain_tree(None, one, 2, 20)) == ["{ grammar", '{" grammar']
    assert spelled(constrain_tree(None, one, 20, 3)) == ["{ grammar", '{" grammar']
    assert constrain_tree(None, one, 0, 20) is None
    assert constrain_tree(None, one, 20, 1) is None


def test_constrained_step_without_draft_or_forced_tokens_is_plain() -> None:
    assert constrain_tree(None, started(PERSON, '{"name": "'), 20, 20) is None
    assert constrain_tree(DraftTree.root_only(9), started(PERSON, '{"name": "'), 20, 20) is None


def test_draft_nodes_the_grammar_forbids_are_dropped_with_descendants() -> None:
    one = started(PERSON, '{"name": "Eve", "age":')
    tree = DraftTree.from_nodes(one.token_ids[-1], [*ids(" x"), *ids(" 7"), *ids(" 55"), V + 1, *ids("1")], [0, 0, 0, 3, 1], "ngram")
    assert spelled(constrain_tree(tree, one, 3, 20)) == [" 7 ngram", " 55 ngram", " 55} grammar"]


def test_forced_grammar_tokens_replace_or_extend_drafts() -> None:
    one = started(PERSON)
    assert spelled(constrain_tree(chain(one, '{"title": "x'), one, 4, 5)) == ["{ ngram", '{" ngram', '{"name grammar', '{"name": grammar']
    assert spelled(constrain_tree(chain(one, '{"name'), one, 5, 9))[2:] == ['{"name ngram', '{"name": grammar', '{"name": " grammar']
    one = started(PERSON, '{"name": "Adam", "age":')
    assert spelled(constrain_tree(chain(one, " 55"), one, 9, 9)) == [" 55 ngram", " 55} grammar"]


def test_draft_tree_allowed_by_the_grammar_is_unchanged() -> None:
    one = started(PERSON)
    tree = chain(one, '{"name":')
    assert constrain_tree(tree, one, 4, 5) is tree
    free = request(SamplingParams())
    assert constrain_tree(tree, free, 4, 5) is tree
    assert constrain_tree(None, free, 4, 5) is None


def test_sampled_draft_tree_is_not_pruned_by_the_grammar() -> None:
    """To take out a draw for what it is would change the distribution of what rejection keeps."""
    one = started(PERSON)
    distribution = np.zeros(V)
    distribution[[93, 50]] = 0.5
    tree = DraftTree.from_nodes(one.token_ids[-1], [50], [0], "draft_model", {0: TokenProbs(distribution)})
    assert constrain_tree(tree, one, 4, 5) is tree


def test_forced_grammar_tokens_are_accepted_without_a_drafter() -> None:
    params = SamplingParams(max_tokens=60, grammar=PERSON, temperature=1.0)
    plain = generate(Target(3), request(params))
    one = request(params)
    assert generate(Target(3), one, lambda one: constrain_tree(None, one, 8, 9)) == plain
    assert one.stats.num_draft_tokens == one.stats.num_accepted_tokens > 8
    assert one.stats.steps < 0.6 * len(plain)


def test_grammar_error_while_drafting_causes_a_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's own row then says why."""
    one = started(PERSON)

    def broken(self: GrammarMatcher, path: Sequence[int]) -> list[int]:
        raise RequestError("grammar: too complex", parameter="grammar")

    monkeypatch.setattr(GrammarMatcher, "forced_tokens", broken)
    assert constrain_tree(chain(one, '{"name'), one, 4, 5) is None
    assert constrain_tree(None, one, 4, 5) is None


def test_end_token_is_drafted_only_if_the_grammar_requires_it() -> None:
    end = EOS_IDS[1]
    one = started(Grammar.regex("ab?"), "a")
    assert constrain_tree(DraftTree.chain(one.token_ids[-1], [end], "ngram"), one, 4, 5) is not None
    one = started(Grammar.regex("ab"), "a")
    assert spelled(constrain_tree(DraftTree.chain(one.token_ids[-1], [end], "ngram"), one, 4, 5)) == ["b grammar"]


# Reasoning: the token that ends it at every place of a window.


@pytest.mark.spread(0.5)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spelling", ["as the tokenizer writes it", "letter by letter"])
def test_grammar_may_start_at_any_position_within_a_draft(temperature: float, spelling: str) -> None:
    whole = spelling == "as the tokenizer writes it"
    marker = ids(REASONING_END) if whole else [token for letter in REASONING_END for token in ids(letter)]
    wishes = (*ids("so, well, let us see"), *marker, *ids('{"name": "x y z'))
    grammar = Grammar(PERSON.kind, PERSON.text, REASONING_END)
    params = SamplingParams(max_tokens=60, grammar=grammar, temperature=temperature)
    target = Target(5, wishes)
    plain = generate(target, request(params))
    border = len(ids("so, well, let us see")) + len(marker)
    assert plain[:border] == list(wishes[:border])
    assert compiler().new_matcher(PERSON).is_allowed(plain[border:])
    assert plain[-1] in EOS_IDS
    for offset in range(8):  # of the first token of the grammar, in a window of seven
        for num_right in range(8):

            def propose(one: Request, start: int = border - offset, num_right: int = num_right) -> DraftTree | None:
                done = one.num_output_tokens
                depth = min(7, one.num_remaining_tokens - 1)
                if done < start or depth < 1:
                    return None
                tree = DraftTree.chain(one.token_ids[-1], [*plain[done : done + num_right], 17][:depth], "oracle")
                return constrain_tree(tree, one, depth, depth + 1)

            one = request(params)
            assert generate(target, one, propose) == plain
            assert one.stats.num_accepted_tokens >= num_right


def test_end_token_is_not_drafted_before_the_end_of_reasoning() -> None:
    grammar = Grammar(PERSON.kind, PERSON.text, REASONING_END)
    params = SamplingParams(max_tokens=20, grammar=grammar)
    plain = generate(Target(1, (*ids("so"), EOS_IDS[0], EOS_IDS[1])), request(params))
    assert len(plain) == 20
    assert not set(plain) & set(EOS_IDS)


def test_forced_grammar_tokens_have_their_own_source_name() -> None:
    """Whoever counts acceptance tells them apart by it."""
    tree = constrain_tree(None, started(PERSON), 2, 3)
    assert tree is not None
    assert tree.sources == ("", FORCED_SOURCE, FORCED_SOURCE)
