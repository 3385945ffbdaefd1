"""`/metrics`: Prometheus's own parser reads it, and its numbers add up to what was answered."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draw_imports import REPOSITORY
from harness.http_client import HttpClient
from paceline import AsyncEngine
from paceline.server.model_pool import served_model_name

CHAT = "/v1/chat/completions"
FIELDS = {"messages": [{"role": "user", "content": "Repeat: one two three one two three one two"}], "temperature": 0, "max_tokens": 40}
LABELS = {"model_name": "mini", "engine": "0"}
Numbers = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(client: HttpClient) -> Numbers:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: Numbers = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.name.startswith("paceline:")
        assert family.documentation
        for sample in family.samples:
            assert sample.labels.items() >= LABELS.items()
            more = {name: value for name, value in sample.labels.items() if name not in LABELS}
            key = sample.name.removeprefix("paceline:"), tuple(sorted(more.items()))
            assert key not in found
            found[key] = sample.value
    return found


def total(numbers: Numbers, name: str) -> float:
    return sum(value for (found, _), value in numbers.items() if found == name)


def grown(client: HttpClient, ask: Callable[[], object]) -> Callable[[str], float]:
    """Increase of a metric while `ask` was answered."""
    before = read(client)
    ask()
    after = read(client)
    return lambda name: total(after, name) - total(before, name)


def test_metrics_counters_equal_the_usage_of_the_answers(client: HttpClient) -> None:
    answers = []
    fields = {**FIELDS, "temperature": 1, "seed": 2, "n": 2}
    growth = grown(client, lambda: answers.append(client.json(CHAT, fields)))
    (answer,) = answers
    usage, stats = answer["usage"], answer["speculation"]
    assert growth("generation_tokens_total") == usage["completion_tokens"]
    assert growth("prompt_tokens_total") == growth("prefix_cache_queries_total") == 2 * usage["prompt_tokens"], "of each sample"
    assert growth("request_success_total") == 2
    assert growth("spec_decode_num_draft_tokens_total") == stats["num_draft_tokens"]
    assert growth("spec_decode_num_accepted_tokens_total") == stats["num_accepted_tokens"]
    assert growth("spec_decode_num_accepted_tokens_per_pos_total") == stats["num_accepted_tokens"]
    assert growth("spec_decode_num_drafts_total") == stats["steps"] - stats["plain_steps"]
    assert growth("plain_steps_total") == stats["plain_steps"]
    assert growth("spec_decode_num_accepted_tokens_total") + stats["num_bonus_tokens"] == usage["completion_tokens"]


def test_latency_metrics_count_streamed_and_whole_requests(client: HttpClient) -> None:
    growth = grown(client, lambda: [client.json(CHAT, FIELDS), client.events(CHAT, FIELDS)])
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert growth(f"{name}_count") == 2
    assert growth("request_time_per_output_token_seconds_count") == 2
    assert 0 < growth("time_to_first_token_seconds_sum") < growth("e2e_request_latency_seconds_sum")


def test_metrics_of_an_idle_engine_are_zero(client: HttpClient) -> None:
    numbers = read(client)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert numbers[name, ()] == 0


def test_metrics_have_the_names_and_labels_of_vllm(client: HttpClient, engine: AsyncEngine) -> None:
    client.json(CHAT, FIELDS)
    numbers = read(client)
    drafter = (("drafter", engine.loaded.drafter_name),)
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert (f"spec_decode_{name}_total", drafter) in numbers
    assert {name for name, _ in numbers} >= {"num_preemptions_total", "prefix_cache_hits_total", "drafter_failures_total"}
    assert ("plain_steps_total", (("reason", "prompt"),)) in numbers


@pytest.mark.parametrize(("model", "name"), [("mini", "mini"), ("owner/name", "owner/name"), ("/usr/lib/", "lib"), (".", None)])
def test_default_served_model_name_contains_no_directories(model: str, name: str | None) -> None:
    assert "/" not in served_model_name(model) or model == "owner/name"
    assert name is None or served_model_name(model) == name


def test_inter_token_latency_counts_every_gap_between_steps(client: HttpClient) -> None:
    """One for each step of a sample after its first; their sum is its time of decoding, whether it was streamed or not."""
    answers: list[dict[str, Any]] = []
    growth = grown(client, lambda: answers.extend([client.json(CHAT, FIELDS), *client.events(CHAT, FIELDS)]))
    steps = answers[0]["speculation"]["steps"]
    assert growth("inter_token_latency_seconds_count") == 2 * (steps - 1)
    seconds, decoding = growth("inter_token_latency_seconds_sum"), growth("request_decode_time_seconds_sum")
    assert seconds == pytest.approx(decoding, rel=0.2)
    buckets = [
        (float(dict(more)["le"]), value) for (name, more), value in read(client).items() if name == "inter_token_latency_seconds_bucket"
    ]
    assert buckets == sorted(buckets)
    assert [value for _, value in buckets] == sorted(value for _, value in buckets)


def test_http_responses_are_counted_by_route_and_status(client: HttpClient) -> None:
    def ask() -> None:
        client.json(CHAT, FIELDS)
        client.refusal(CHAT, {})
        client.get("/a/path/of/the/client")

    before, _, after = read(client), ask(), read(client)
    grew = {more: value - before.get((name, more), 0.0) for (name, more), value in after.items() if name == "http_requests_total"}
    assert {more: value for more, value in grew.items() if value and dict(more)["route"] != "/metrics"} == {
        (("route", CHAT), ("status", "200")): 1,
        (("route", CHAT), ("status", "400")): 1,
        (("route", "none"), ("status", "404")): 1,
    }


DASHBOARD = json.loads((REPOSITORY / "docs/grafana/paceline.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_grafana_dashboard_uses_only_existing_metrics(client: HttpClient) -> None:
    client.json(CHAT, FIELDS)
    names = {f"paceline:{name}" for name, _ in read(client)}
    asked = set(re.findall(r"paceline:\w+", json.dumps(DASHBOARD)))
    assert len(asked) > 20
    assert asked - names == set()


def test_grafana_dashboard_shows_every_metric(client: HttpClient) -> None:
    client.json(CHAT, FIELDS)
    families = {name for name, _ in read(client)}
    families = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in families}
    shown = json.dumps(DASHBOARD)
    assert {name for name in families if name not in shown} == {"request_time_per_output_token_seconds", "request_inference_time_seconds"}


def test_grafana_dashboard_is_valid() -> None:
    """What its importer needs: ids that differ, places that do not overlap, targets with queries whose brackets close."""
    assert {"title", "uid", "schemaVersion", "templating", "time"} <= DASHBOARD.keys()
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        covered = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not covered & places, panel["title"]
        assert place["x"] + place["w"] <= 24
        places |= covered
    for panel in PANELS:
        assert panel["description"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")") > 0, target["expr"]
