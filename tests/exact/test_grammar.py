"""Constrained output is the same with speculation off and on, and it matches the grammar."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from harness.always_drafts import set_drafters
from harness.answer_drafters import ChaosDrafter
from harness.grammar_schemas import random_schema
from paceline import LLM, SamplingParams
from paceline.errors import RequestError
from paceline.outputs import RequestOutput
from paceline.runtimes.native.library import kernels_path
from paceline.sampling.grammars.compiler import GrammarCompiler
from paceline.sampling.grammars.grammar import Grammar
from paceline.speculation import propose
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter

MAX_TOKENS = 200
AT_ONCE = 12
DRAFTERS = ["none", "ngram", "draft_model", "draft_tree", "chaos"]


@dataclass(frozen=True)
class Case:
    """One request: a prompt, and a schema for its answer."""

    prompt: str
    params: SamplingParams
    schema: dict[str, Any]


@dataclass(frozen=True)
class ReferenceOutput:
    """What plain constrained decoding answers, one request at a time."""

    directory: Path
    cases: list[Case]
    outputs: list[RequestOutput]
    vocab_size: int


def open_llm(directory: Path, drafter: str | Drafter, **options: Any) -> LLM:
    return LLM(str(directory), threads=2, max_model_len=512, kv_cache_gb=0.2, drafter=drafter, **options)


def generate(llm: LLM, cases: Sequence[Case], at_once: int) -> list[RequestOutput]:
    """Several requests in one batch, each with parameters of its own."""
    outputs: list[RequestOutput] = []
    opened = llm._loaded
    for start in range(0, len(cases), at_once):
        requests = []
        for case in cases[start : start + at_once]:
            prompt = opened.input_processor.prompt_ids(case.prompt)
            requests += opened.make_requests([prompt], case.params, {}, is_streamed=False)
        with closing(llm.engine.run(requests)) as steps:
            for _ in steps:
                pass
        outputs += [opened.make_output(request) for request in requests]
    return outputs


SETS: list[dict[str, Any]] = [
    {"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 1, "maximum": 6}, "minItems": 5},
    {"type": "array", "uniqueItems": True, "items": {"type": "string", "pattern": "^[a-z]+$"}, "minItems": 3, "maxItems": 6},
    {"type": "array", "uniqueItems": True, "items": {"enum": ["red", "reddish", "green"]}, "minItems": 2},
]


@pytest.fixture(scope="module")
def reference(mini_dir: Path, large_counts: bool, seed: int) -> ReferenceOutput:
    generator = np.random.default_rng(seed)
    llm = open_llm(mini_dir, "none")
    if llm.numerics != "exact":
        assert kernels_path() is None
        pytest.skip("this machine has no exact numerics")
    cases = []
    for index in range(500 if large_counts else 24):
        schema = SETS[index // 5 % len(SETS)] if index % 5 == 4 else random_schema(generator)
        for temperature in (0.0, 1.0) if large_counts else (float(index % 2),):
            params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=len(cases), grammar=Grammar.json_schema(schema))
            cases.append(Case(f"{index}:", params, schema))
    return ReferenceOutput(mini_dir, cases, generate(llm, cases, 1 if large_counts else AT_ONCE), llm.vocab_size)


def make_drafter(kind: str, reference: ReferenceOutput, seed: int) -> str | Drafter:
    if kind == "chaos":
        pairs = zip(reference.cases, reference.outputs, strict=True)
        answers = {(tuple(output.prompt_token_ids), case.params.seed or 0): output.token_ids for case, output in pairs}
        return ChaosDrafter(answers, reference.vocab_size, seed=seed)
    return str(reference.directory / "draft") if kind.startswith("draft") else kind


def test_finished_json_output_validates_and_cut_output_is_a_prefix(reference: ReferenceOutput, mini_dir: Path) -> None:
    llm = open_llm(mini_dir, "none")
    compiler = GrammarCompiler(llm.tokenizer, (0, 2))
    num_finished = 0
    for case, output in zip(reference.cases, reference.outputs, strict=True):
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), case.schema)
            num_finished += 1
        else:
            assert len(output.token_ids) == MAX_TOKENS
        assert case.params.grammar is not None
        assert compiler.new_matcher(case.params.grammar).is_allowed(output.token_ids)
    assert num_finished >= 0.9 * len(reference.cases)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_change_no_token_under_a_grammar(
    kind: str, reference: ReferenceOutput, large_counts: bool, seed: int, tally: "Counter[str]"
) -> None:
    drafter = make_drafter(kind, reference, seed)
    if kind in ("none", "draft_model") and not large_counts:
        pytest.skip("left to make test-long: the reference itself, and one path of what is drafted as a tree")
    count = int(np.random.default_rng([seed, len(kind)]).integers(2, 9))
    llm = open_llm(reference.directory, drafter, num_speculative_tokens=count, tree_width=3 if kind == "draft_tree" else 1)
    llm.engine.speculator.policy = FixedDraftLength(count, max_rows=12 if kind in ("draft_tree", "chaos") else None)
    every = 2 if kind == "chaos" and not large_counts else 1
    outputs = generate(llm, reference.cases[::every], AT_ONCE)
    for case, output, plain in zip(reference.cases[::every], outputs, reference.outputs[::every], strict=True):
        assert (case.prompt, output.token_ids) == (case.prompt, plain.token_ids)
        assert (output.finish_reason, output.text) == (plain.finish_reason, plain.text)
    tally["token ids compared with plain constrained decoding"] += sum(len(output.token_ids) for output in outputs)
    accepted = sum(output.speculation.num_accepted_tokens for output in outputs)
    assert accepted > 0.3 * sum(len(output.token_ids) for output in outputs) or kind == "none"


def test_drafts_change_no_answer_after_reasoning(mini_dir: Path, large_counts: bool) -> None:
    """The reasoning ends wherever the model first writes a common letter: anywhere in a window."""
    grammar = Grammar.json_schema({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}, reasoning_end="t")
    grammar = replace(grammar, text=json.dumps({**json.loads(grammar.text), "additionalProperties": False}))
    cases = [
        Case("Once upon", SamplingParams(max_tokens=60, temperature=float(seed % 2), seed=seed, grammar=grammar), {})
        for seed in range(60 if large_counts else 8)
    ]
    plain = generate(open_llm(mini_dir, "none"), cases, AT_ONCE)
    borders = set()
    for output in plain:
        thought, _, answer = output.text.partition("{")
        assert "t" in thought
        assert json.loads("{" + answer).keys() == {"ok"}
        borders.add(len(thought))
    assert len(borders) > 3
    for drafter in ("ngram", str(mini_dir / "draft")):
        llm = open_llm(mini_dir, drafter, num_speculative_tokens=6)
        llm.engine.speculator.policy = FixedDraftLength(6)
        assert [output.token_ids for output in generate(llm, cases, AT_ONCE)] == [output.token_ids for output in plain]


# Planted faults: each must make the comparison fail.


def test_fault_of_drafts_without_the_grammar_is_found(reference: ReferenceOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that ignores the path is right only at the root."""
    from paceline.sampling.grammars.matcher import GrammarMatcher

    real = GrammarMatcher.mask
    monkeypatch.setattr(GrammarMatcher, "mask", lambda self, scores, path: real(self, scores, path[:0]))
    monkeypatch.setattr(propose, "constrain_draft", lambda *_: None)
    few = reference.cases[:10]
    llm = open_llm(reference.directory, "ngram", num_speculative_tokens=4)
    drafter = make_drafter("chaos", reference, 1)
    assert isinstance(drafter, Drafter)
    set_drafters(llm, drafter)
    try:
        outputs = generate(llm, few, AT_ONCE)
    except RequestError:  # what was not masked is refused when it is committed
        return
    assert [output.token_ids for output in outputs] != [output.token_ids for output in reference.outputs[:10]]
