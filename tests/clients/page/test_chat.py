"""A conversation on the page, and what it shows of every token."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness.page_driver import (
    CHAT,
    TAXI,
    Step,
    ask,
    compare,
    open_settings,
    record,
    script,
    script_slowly,
    scripted_stream,
    send,
    show_tokens,
    until,
    wait,
)

HELLO: Sequence[Step] = [(["Hel"], [], 0), (["lo", " wor", "ld"], ["lo", " wor", "k"], 2), (["!"], ["?", "?"], 0)]


def test_page_token_colours_equal_the_origins_of_the_api(page: Any, server: Any) -> None:
    asked = record(page)
    open_settings(page)
    page.get_by_label("Temperature").fill("0")
    ask(page, "Write a Python function that adds two numbers.")
    show_tokens(page)
    stats = server.answer(asked[0])["speculation"]
    shown = page.locator(".strip .token")
    titles = [title.split(", id ") for title in shown.evaluate_all("nodes => nodes.map(node => node.title)")]
    assert [int(token_id) for _, token_id in titles] == stats["token_ids"][0]
    # how much is drafted follows measured times, so the steps of two runs may differ; the tokens may not
    assert {origin for origin, _ in titles} <= {"accepted", "bonus", "plain"}
    assert all("".join(classes.split()) == f"token{origin}" for classes, (origin, _) in zip(classes_of(shown), titles, strict=True))
    line = page.locator(".tokens > summary").inner_text()
    numbers = dict(zip(page.locator(".numbers dt").all_text_contents(), page.locator(".numbers dd").all_text_contents(), strict=True))
    counts = Counter(origin for origin, _ in titles)
    steps = page.locator(".strip .step").count()
    assert numbers["drafts accepted"].split()[0] == str(counts["accepted"])
    assert (numbers["tokens"], numbers["steps"]) == (str(len(titles)), str(steps))
    assert numbers["mean acceptance length"] == f"{len(titles) / steps:.2f}"
    num_tokens, rate, per_step = (float(part.split()[0]) for part in line.split(" · "))
    assert (num_tokens, per_step) == (len(titles), round(len(titles) / steps, 1))
    assert rate > 0


def classes_of(nodes: Any) -> list[str]:
    found: list[str] = nodes.evaluate_all("nodes => nodes.map(node => node.className)")
    return found


def test_page_groups_tokens_by_step_and_opens_the_draft_tree(page: Any) -> None:
    script(page, scripted_stream(HELLO))
    ask(page)
    show_tokens(page)
    steps = page.locator(".strip .step")
    assert steps.all_text_contents() == ["Hel", "lo world", "!"]
    step = page.get_by_role("button", name="Step 2: “lo world”, 2 of 3 draft tokens accepted")
    step.click()
    assert step.get_attribute("aria-expanded") == "true"
    tree = page.get_by_role("region", name="Draft tree of step 2")
    assert classes_of(tree.locator(".node")) == ["node root", "node accepted", "node accepted", "node bonus", "node rejected"]
    assert tree.locator(".node .text").all_text_contents() == ["Hel", "lo", " wor", "ld", "k"]
    assert "3 drafted by scripted, 2 accepted; one pass of the model gave 3 tokens" in tree.inner_text()
    steps.nth(2).click()
    tree = page.get_by_role("region", name="Draft tree of step 3")
    assert classes_of(tree.locator(".node")) == ["node root", "node bonus", "node rejected", "node rejected"]
    steps.nth(0).click()
    assert "No draft: no drafter had a draft." in page.get_by_role("region", name="Draft tree of step 1").inner_text()
    steps.nth(0).click()
    assert page.locator(".tree").count() == 0


def test_page_comparison_without_drafts_shows_equal_token_ids(page: Any) -> None:
    asked = record(page)
    ask(page)
    compare(page)
    drafted, plain = asked
    assert plain["speculation"]["enabled"] is False
    assert {**plain, "speculation": 0} == {**drafted, "speculation": 0}, "prompt, seed and parameters are the same"
    sides = page.locator(".sides .strip")
    left, right = (sides.nth(index).locator(".token") for index in (0, 1))
    ids = "nodes => nodes.map(node => node.title.split(', id ')[1])"
    assert left.evaluate_all(ids) == right.evaluate_all(ids) != []
    assert set(classes_of(right)) == {"token plain"}
    verdict = page.locator(".verdict").inner_text()
    assert verdict.startswith(f"✓ The same {left.count()} token ids, compared one by one.")
    seconds = [float(clock.removesuffix(" s")) for clock in page.locator(".lane .clock").all_inner_texts()]
    speed, shown = float(verdict.split(".", 1)[1].removesuffix(" × the speed")), 0.0005  # half of the last digit that the clocks show
    assert (seconds[1] - shown) / (seconds[0] + shown) - 0.005 <= speed <= (seconds[1] + shown) / (seconds[0] - shown) + 0.005
    page.get_by_text("The token ids, side by side").click()
    page.locator(".ids tbody tr").first.wait_for()
    rows = [row.split("\t") for row in page.locator(".ids tbody tr").all_inner_texts()]
    assert [row[2] for row in rows] == [row[3] for row in rows] == left.evaluate_all(ids)
    assert {row[4] for row in rows} == {"✓"}
    page.get_by_role("button", name="Close the comparison").click()
    assert page.locator(".comparison").count() == 0


def test_page_comparison_shows_the_first_differing_token(page: Any) -> None:
    other = scripted_stream([(["Hel"], [], 0), (["la"], [], 0)], first_id=100).replace("[101]", "[777]")
    script(page, scripted_stream(HELLO), other, other.replace('"exact"', '"fast"'))
    ask(page)
    for reason in ("", " Numerics is fast here: near-ties may fall otherwise."):
        page.get_by_role("button", name="Compare without drafts").click()
        page.get_by_text("Token 2 differs").wait_for()
        until(page, lambda: page.locator(".sides .strip").nth(1).locator(".token").count() == 2)
        shown = page.locator(".verdict.different").inner_text()
        assert shown == f"✕ Token 2 differs: lo (id 101) with drafts, la (id 777) without.{reason}"


def test_page_comparison_of_a_shorter_answer_differs_at_its_end(page: Any) -> None:
    script(page, scripted_stream(HELLO), scripted_stream(HELLO[:2]))
    ask(page)
    page.get_by_role("button", name="Compare without drafts").click()
    page.get_by_text("Token 5 differs").wait_for()
    assert "! (id 104) with drafts, none without." in page.locator(".verdict").inner_text()


def test_stopped_answer_on_the_page_is_kept_and_can_be_compared(page: Any) -> None:
    asked = []

    def endless(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.continue_(post_data=json.dumps({**asked[-1], "ignore_eos": True, "max_tokens": min(asked[-1]["max_tokens"], 1500)}))

    page.route(CHAT, endless)
    open_settings(page)
    page.get_by_label("Max tokens").fill("1800")
    send(page)
    show_tokens(page)
    page.locator(".strip .step").nth(5).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.", exact=True).first.wait_for()
    num_tokens = page.locator(".strip .token").count()
    assert 6 <= num_tokens < 1500
    assert page.locator(".strip .token").count() == num_tokens
    compare(page)
    assert asked[1]["max_tokens"] == num_tokens


def test_edited_page_message_replaces_the_later_turns(page: Any) -> None:
    asked = record(page)
    for text in ("First question", "Second question"):
        ask(page, text)
    for place, text in ((1, "Third question"), (0, "Fourth question")):
        page.get_by_role("button", name="Edit").nth(place).click()
        field = page.get_by_label("Edit the message")
        assert field.input_value() == ("First question", "Second question")[place]
        field.fill(text)
        page.keyboard.press("Enter")
        until(page, lambda: page.locator(".typed").last.inner_text() == text)  # noqa: B023
        wait(page)
    said = [[message["content"] for message in fields["messages"] if message["role"] == "user"] for fields in asked]
    assert said[2:] == [["First question", "Third question"], ["Fourth question"]]
    assert page.locator(".turn").count() == 2
    page.get_by_role("button", name="Edit").click()
    page.keyboard.press("Escape")
    assert page.locator(".typed").all_text_contents() == ["Fourth question"]


def test_page_retry_uses_a_new_seed_unless_a_seed_is_set(page: Any) -> None:
    asked = record(page)
    ask(page)
    page.get_by_role("button", name="Retry").click()
    until(page, lambda: len(asked) == 2)
    wait(page)
    assert asked[0]["seed"] != asked[1]["seed"]
    assert {**asked[0], "seed": 0} == {**asked[1], "seed": 0}
    open_settings(page)
    page.get_by_label("Seed").fill("7")
    texts = []
    for _ in range(2):
        page.get_by_role("button", name="Retry").click()
        until(page, lambda: page.get_by_role("status").inner_text().startswith("The answer is there"))
        texts.append(page.locator(".markdown").inner_text())
    assert asked[2] == asked[3]
    assert texts[0] == texts[1] != ""


def test_page_sends_all_turns_and_a_new_chat_starts_empty(page: Any) -> None:
    asked = script(page, scripted_stream(HELLO))
    ask(page, "One")
    send(page, "Two")
    until(page, lambda: page.locator(".answer .tokens").count() == 2)
    turns = [(message["role"], message["content"]) for message in asked[1]["messages"]]
    assert turns == [("user", "One"), ("assistant", "Hello world!"), ("user", "Two")]
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    ask(page, "Three")
    assert len(asked[2]["messages"]) == 1


SETTINGS = {
    "Temperature": 0.3, "Top p": 0.9, "Top k": 40, "Min p": 0.05, "Min tokens": 2, "Repetition": 1.1, "Presence": 0.5, "Frequency": -0.5,
    "Stop texts": "END\nSTOP", "Banned words": "bad", "Logit bias": '{"7": -100}', "System prompt": "Be short.",
}  # fmt: skip


def fill(page: Any, settings: Mapping[str, object]) -> None:
    for label, value in settings.items():
        page.get_by_label(label).fill(str(value))


def test_page_settings_are_sent_as_request_fields(page: Any) -> None:
    asked = script(page, scripted_stream(HELLO))
    open_settings(page)
    options = page.get_by_label("Drafter").locator("option").all_text_contents()
    assert options == ["draft_model+suffix", "draft_model", "suffix", "none (plain)"]
    fill(page, {**SETTINGS, "Max tokens": 33, "Seed": 5, "Draft tokens a step": 2, "JSON schema of": '{"type": "object"}'})
    for drafter in ("suffix", "none"):
        page.get_by_label("Drafter").select_option(drafter)
        ask(page)
        page.get_by_role("button", name="New chat").click()
    chosen = {"temperature": 0.3, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 33, "seed": 5, "min_tokens": 2}
    chosen |= {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": ["END", "STOP"], "bad_words": ["bad"]}
    chosen |= {"logit_bias": {"7": -100}}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert all({**fields, **chosen, "response_format": schema} == fields for fields in asked)
    assert [message["content"] for message in asked[0]["messages"]] == ["Be short.", TAXI]
    assert [fields["speculation"] for fields in asked] == [
        {"trees": True, "drafter": "suffix", "num_speculative_tokens": 2},
        {"enabled": False, "trees": True},
    ]


def test_empty_page_settings_are_not_sent(page: Any) -> None:
    asked = script(page, scripted_stream(HELLO))
    ask(page)
    assert set(asked[0]) == {"model", "messages", "stream", "stream_options", "max_tokens", "seed", "speculation"}


def test_server_accepts_every_page_setting(page: Any) -> None:
    asked = record(page)
    open_settings(page)
    fill(page, {**SETTINGS, "Max tokens": 9})
    ask(page)
    assert page.get_by_role("alert").count() == 0
    fill(page, {"Min tokens": "", "Banned words": "", "Max tokens": 40, "JSON schema of": '{"enum": ["yes", "no"]}'})
    page.get_by_role("button", name="Retry").click()
    until(page, lambda: len(asked) == 2)
    wait(page)
    assert page.get_by_role("alert").count() == 0
    assert page.locator(".markdown").inner_text() in ('"yes"', '"no"')


def test_page_shows_why_an_answer_was_cut(page: Any) -> None:
    cut = scripted_stream(HELLO, finish_reason="length")
    script(page, cut, cut, scripted_stream(HELLO))
    notes = page.locator(".answer > .note")
    open_settings(page)
    limit, context = "Cut after 5 tokens: raise Max tokens in the settings for more.", "Cut where the context is full."
    for max_tokens, shown in (("5", [limit]), ("", [context]), ("5", [])):
        page.get_by_label("Max tokens").fill(max_tokens)
        ask(page)
        assert notes.all_inner_texts() == shown
        page.get_by_role("button", name="New chat").click()


def test_invalid_json_in_a_page_setting_is_reported_and_keeps_the_message(page: Any) -> None:
    open_settings(page)
    field = page.get_by_label("JSON schema of")
    field.fill('{"type": ')
    assert field.get_attribute("aria-invalid") == "true"
    page.get_by_label("Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    assert page.get_by_role("alert").inner_text().startswith("JSON schema of the answer is not JSON: ")
    assert page.get_by_label("Message", exact=True).input_value() == "Hello"
    assert page.locator(".turn").count() == 0
    page.get_by_role("button", name="Reset the settings").click()
    assert (field.input_value(), page.get_by_label("Max tokens").input_value()) == ("", "1024")


def test_page_copy_button_copies_the_markdown_of_the_answer(open_page: Any, server: Any) -> None:
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    script(page, scripted_stream([(["**Hello**", "\n\n", "* one"], [], 0)]))
    send(page)
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "**Hello**\n\n* one"


def test_page_shows_whitespace_and_incomplete_characters_of_tokens(page: Any) -> None:
    script(page, scripted_stream([(["a\n"], [], 0), (["\t", "  b", "bytes:\\xe2\\x82"], ["\t", "  b"], 2)]))
    ask(page)
    show_tokens(page)
    assert page.locator(".strip .token").all_text_contents() == ["a↵", "→", "  b", "⟨e2 82⟩"]


def test_reasoning_on_the_page_is_folded_and_not_sent_back(page: Any) -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "They say *hello*."}, "finish_reason": None}]}
    asked = script(page, f"data: {json.dumps(thought)}\n\n{scripted_stream(HELLO)}")
    ask(page, "Hello")
    thoughts = page.locator(".thoughts .markdown")
    assert not thoughts.is_visible()
    page.get_by_text("Thoughts").click()
    assert thoughts.inner_text() == "They say hello."
    ask(page, "Again")
    assert [message["content"] for message in asked[1]["messages"]] == ["Hello", "Hello world!", "Again"]


def test_page_scrolls_with_the_answer_until_the_user_scrolls_up(page: Any) -> None:
    script_slowly(page, scripted_stream([([f"line {index}", "\n\n"], ["line"], 0) for index in range(150)]), pause_ms=20)
    send(page)
    places = "[scrollY, document.documentElement.scrollHeight - innerHeight]"
    until(page, lambda: page.evaluate(places)[1] > 500)
    place, end = page.evaluate(places)
    assert end - place <= 2
    page.mouse.move(600, 300)
    page.mouse.wheel(0, -400)
    page.wait_for_timeout(300)
    before, end = page.evaluate(places)
    until(page, lambda: page.evaluate(places)[1] > end + 300)
    assert page.evaluate(places)[0] == before


def test_page_shows_speed_and_tokens_per_step_during_the_answer(page: Any) -> None:
    script_slowly(page, scripted_stream([(["a", "b"], ["a"], 1)] * 60), pause_ms=30)
    send(page)
    show_tokens(page)
    until(page, lambda: page.locator(".strip .step").count() > 5)
    assert page.get_by_role("button", name="Stop").is_visible()
    line = page.locator(".tokens > summary")
    _, rate, per_step = line.inner_text().split(" · ")
    assert float(rate.split()[0]) > 0
    assert per_step == "2.0 tokens a step"
    wait(page)
    assert line.inner_text() == "120 tokens · 236 tokens/s · 2.0 tokens a step", "118 in half a second, by the server's clock"
