"""Reports: one page without external resources, with untrusted text escaped, and with the counts of the transformers check."""

import json
from html.parser import HTMLParser
from typing import Any

import numpy as np

from paceline.proof.exactness.cases import SAMPLINGS, Case, CaseRequest, Setting, sampling
from paceline.proof.exactness.compare import Finding, Kind, Status
from paceline.proof.exactness.prove import Proof
from paceline.proof.exactness.report import _without_token, page
from paceline.proof.exactness.run_case import Tally
from paceline.proof.exactness.transformers_check import TransformersComparison, compare_rows

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e<img src=x onerror=y>"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attributes


def proof_of(hostile: str) -> Proof:
    params = sampling("T=0.7", seed=1, max_tokens=12)
    request = CaseRequest(hostile, (1, 2, 3), hostile, params, hostile)
    case = Case(4, 0, 9, Setting(hostile, "4", "tree", 1, "cold"), (request,))
    finding = Finding(
        kind=Kind.TOKENS, status=Status.BUG, details=hostile, case=4, request=0, position=2, plain_token=5, token=6, plain_piece=hostile,
        piece=hostile, margin=float("inf"), rows_differ_by=0.5, step={"sources": [hostile]},
    )  # fmt: skip
    tally = Tally.of({"drafter": [hostile], "event": ["cold"]})
    provenance = {"model": hostile, "command": ["paceline", "prove", "--model", hostile, "--seed", "1"], "files": {hostile: 3}}
    return Proof(
        seed=1, num_tokens=10, numerics="exact", findings=[finding], cases={4: case}, tally=tally, provenance=provenance,
        transformers=TransformersComparison("not_compared", hostile),
    )  # fmt: skip


def test_prove_html_report_escapes_text_of_the_model() -> None:
    proof = proof_of(HOSTILE)
    made, harmless = Tags(), Tags()
    text = page(proof.as_dict())
    made.feed(text)
    harmless.feed(page(proof_of("plain").as_dict()))
    assert made.names == harmless.names
    assert "script" not in made.names
    assert not {"\x1b", "\u202e"} & set(text)
    assert {name for name, _ in made.attributes} <= {"lang", "charset", "name", "content", "class", "style", "http-equiv"}


def test_prove_html_report_loads_no_external_resource() -> None:
    text = page(proof_of("plain").as_dict())
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_prove_report_with_any_finding_is_valid_json() -> None:
    facts = json.loads(json.dumps(proof_of(HOSTILE).as_dict(), allow_nan=False))
    (finding,) = facts["findings"]
    assert finding["margin"] is None
    assert Case.from_dict(finding["replay"]).as_dict() == finding["replay"]
    assert finding["repeat"] == ["paceline", "prove", "--model", HOSTILE, "--seed", "1", "--case", "4"]


def test_prove_report_contains_no_access_token() -> None:
    assert "secret" not in " ".join(_without_token(["paceline", "prove", "--hf-token", "secret", "--hf-token=secret", "--tokens", "9"]))
    assert _without_token(["paceline", "prove", "--tokens", "9"]) == ["paceline", "prove", "--tokens", "9"]
    assert _without_token([]) == []  # called from Python


def test_prove_case_request_json_round_trip_for_every_sampling() -> None:
    for name in SAMPLINGS:
        request = CaseRequest("some", (1, 2), name, sampling(name, seed=5, max_tokens=20), "ngram", 3, 7)
        assert CaseRequest.from_dict(json.loads(json.dumps(request.as_dict()))) == request


def rows(*scores: float) -> list[Any]:
    return [np.array(scores, np.float32)]


def test_comparison_with_transformers_agrees_up_to_near_ties() -> None:
    ours, theirs = rows(1.0, 0.0, -1.0), np.array([[1.001, 0.0, -1.0, 99.0]], np.float32)
    same = compare_rows([(ours, theirs)], 1e-3)
    assert (same.status, same.positions, same.argmax_equal) == ("agrees", 1, 1)
    tied = compare_rows([(ours, np.array([[1.0, 1.0001, -1.0]], np.float32))], 1e-3)
    assert (tied.status, tied.argmax_equal, tied.near_ties) == ("agrees", 0, 1)
    assert abs(tied.largest_margin - 1e-4) < 1e-6


def test_comparison_with_transformers_differs_if_another_token_is_best() -> None:
    found = compare_rows([(rows(1.0, 0.0, -1.0), np.array([[0.0, 1.0, -1.0]], np.float32))], 1e-3)
    assert (found.status, found.differing) == ("differs", 1)
    assert found.max_abs_difference == 1.0
