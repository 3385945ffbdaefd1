"""A conversation on the page, and what it shows of every token."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.page_driver import CHAT, Step, record, script, script_slowly, scripted_stream, send, until, wait

HELLO: Sequence[Step] = [(["Hel"], [], 0), (["lo", " wor", "ld"], ["lo", " wor", "k"], 2), (["!"], ["?", "?"], 0)]


def test_every_token_is_coloured_by_who_guessed_it_as_the_api_says(page: Any, server: Any) -> None:
    asked = record(page)
    page.get_by_label("Temperature").fill("0")
    send(page, "Write a Python function that adds two numbers.")
    wait(page)
    stats = server.answer(asked[0])["speculation"]
    shown = page.locator(".strip .token")
    titles = [title.split(", id ") for title in shown.evaluate_all("nodes => nodes.map(node => node.title)")]
    assert [int(token_id) for _, token_id in titles] == stats["token_ids"][0]
    # how much is drafted follows measured times, so the steps of two runs may differ; the tokens may not
    assert {origin for origin, _ in titles} <= {"accepted", "bonus", "plain"}
    assert all("".join(classes.split()) == f"token{origin}" for classes, (origin, _) in zip(classes_of(shown), titles, strict=True))
    numbers = dict(zip(page.locator(".numbers dt").all_text_contents(), page.locator(".numbers dd").all_text_contents(), strict=True))
    counts = Counter(origin for origin, _ in titles)
    steps = page.locator(".strip .step").count()
    assert numbers["drafts accepted"].split()[0] == str(counts["accepted"])
    assert (numbers["tokens"], numbers["steps"]) == (str(len(titles)), str(steps))
    assert numbers["mean acceptance length"] == f"{len(titles) / steps:.2f}"
    assert float(numbers["tokens/s"]) > 0


def classes_of(nodes: Any) -> list[str]:
    found: list[str] = nodes.evaluate_all("nodes => nodes.map(node => node.className)")
    return found


def test_a_step_is_one_group_and_opens_its_tree(page: Any) -> None:
    script(page, scripted_stream(HELLO))
    send(page)
    wait(page)
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


def test_the_same_without_drafts_has_the_same_token_ids(page: Any) -> None:
    asked = record(page)
    send(page)
    wait(page)
    page.get_by_role("button", name="Compare without drafts").click()
    page.locator(".verdict.same").wait_for()
    drafted, plain = asked
    assert plain["speculation"]["enabled"] is False
    assert {**plain, "speculation": 0} == {**drafted, "speculation": 0}, "prompt, seed and parameters are the same"
    sides = page.locator(".sides .strip")
    left, right = (sides.nth(index).locator(".token") for index in (0, 1))
    ids = "nodes => nodes.map(node => node.title.split(', id ')[1])"
    assert left.evaluate_all(ids) == right.evaluate_all(ids) != []
    assert set(classes_of(right)) == {"token plain"}
    assert page.locator(".verdict").inner_text() == f"✓ The same {left.count()} token ids, compared one by one."
    rows = page.locator(".comparison tbody tr").all_inner_texts()
    assert all(float(row.split("\t")[1]) > 0 for row in rows), rows
    assert page.locator(".comparison tfoot").inner_text().endswith("×")


def test_the_first_difference_is_shown_if_there_is_one(page: Any) -> None:
    other = scripted_stream([(["Hel"], [], 0), (["la"], [], 0)], first_id=100).replace("[101]", "[777]")
    script(page, scripted_stream(HELLO), other, other.replace('"exact"', '"fast"'))
    send(page)
    wait(page)
    for reason in ("", " Numerics is fast here: near-ties may fall otherwise."):
        page.get_by_role("button", name="Compare without drafts").click()
        page.get_by_text("Token 2 differs").wait_for()
        until(page, lambda: page.locator(".sides .strip").nth(1).locator(".token").count() == 2)
        shown = page.locator(".verdict.different").inner_text()
        assert shown == f"✕ Token 2 differs: lo (id 101) with drafts, la (id 777) without.{reason}"


def test_an_answer_that_is_shorter_differs_where_it_ends(page: Any) -> None:
    script(page, scripted_stream(HELLO), scripted_stream(HELLO[:2]))
    send(page)
    wait(page)
    page.get_by_role("button", name="Compare without drafts").click()
    page.get_by_text("Token 5 differs").wait_for()
    assert "! (id 104) with drafts, none without." in page.locator(".verdict").inner_text()


def test_stop_keeps_what_is_there_and_the_rest_can_be_compared(page: Any) -> None:
    asked = []

    def endless(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.continue_(post_data=json.dumps({**asked[-1], "ignore_eos": True, "max_tokens": min(asked[-1]["max_tokens"], 1500)}))

    page.route(CHAT, endless)
    page.get_by_label("Max tokens").fill("1800")
    send(page)
    page.locator(".strip .step").nth(5).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.", exact=True).first.wait_for()
    num_tokens = page.locator(".strip .token").count()
    assert 6 <= num_tokens < 1500
    assert page.locator(".strip .token").count() == num_tokens
    page.get_by_role("button", name="Compare without drafts").click()
    page.locator(".verdict.same").wait_for()
    assert asked[1]["max_tokens"] == num_tokens


def test_an_edited_message_replaces_what_followed(page: Any) -> None:
    asked = record(page)
    for text in ("First question", "Second question"):
        send(page, text)
        wait(page)
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


def test_a_retry_draws_another_seed_and_a_given_seed_repeats_the_answer(page: Any) -> None:
    asked = record(page)
    send(page)
    wait(page)
    page.get_by_role("button", name="Retry").click()
    until(page, lambda: len(asked) == 2)
    wait(page)
    assert asked[0]["seed"] != asked[1]["seed"]
    assert {**asked[0], "seed": 0} == {**asked[1], "seed": 0}
    page.get_by_label("Seed").fill("7")
    texts = []
    for _ in range(2):
        page.get_by_role("button", name="Retry").click()
        until(page, lambda: page.get_by_role("status").inner_text().startswith("The answer is there"))
        texts.append(page.locator(".markdown").inner_text())
    assert asked[2] == asked[3]
    assert texts[0] == texts[1] != ""


def test_the_whole_conversation_is_sent_and_a_new_one_begins_empty(page: Any) -> None:
    asked = script(page, scripted_stream(HELLO))
    send(page, "One")
    wait(page)
    send(page, "Two")
    until(page, lambda: page.locator(".answer .numbers").count() == 2)
    turns = [(message["role"], message["content"]) for message in asked[1]["messages"]]
    assert turns == [("user", "One"), ("assistant", "Hello world!"), ("user", "Two")]
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    send(page, "Three")
    wait(page)
    assert len(asked[2]["messages"]) == 1


def test_what_is_chosen_is_what_is_sent(page: Any) -> None:
    asked = script(page, scripted_stream(HELLO))
    options = page.get_by_label("Drafter").locator("option").all_text_contents()
    assert options == ["draft_model+ngram", "draft_model", "ngram", "none (plain)"]
    for label, value in {"Temperature": "0.3", "Top p": "0.9", "Max tokens": "33", "Seed": "5", "Draft tokens a step": "2"}.items():
        page.get_by_label(label).fill(value)
    for drafter in ("ngram", "none"):
        page.get_by_label("Drafter").select_option(drafter)
        send(page)
        wait(page)
        page.get_by_role("button", name="New chat").click()
    chosen = {"temperature": 0.3, "top_p": 0.9, "max_tokens": 33, "seed": 5}
    assert all({name: fields[name] for name in chosen} == chosen for fields in asked)
    assert [fields["speculation"] for fields in asked] == [
        {"trees": True, "drafter": "ngram", "num_speculative_tokens": 2},
        {"enabled": False, "trees": True},
    ]


def test_an_answer_is_copied_as_the_model_wrote_it(open_page: Any, server: Any) -> None:
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    script(page, scripted_stream([(["**Hello**", "\n\n", "* one"], [], 0)]))
    send(page)
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "**Hello**\n\n* one"


def test_spaces_line_ends_and_parts_of_characters_can_be_seen(page: Any) -> None:
    script(page, scripted_stream([(["a\n"], [], 0), (["\t", "  b", "bytes:\\xe2\\x82"], ["\t", "  b"], 2)]))
    send(page)
    wait(page)
    assert page.locator(".strip .token").all_text_contents() == ["a↵", "→", "  b", "⟨e2 82⟩"]


def test_thoughts_are_folded_and_not_sent_back(page: Any) -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "They say *hello*."}, "finish_reason": None}]}
    asked = script(page, f"data: {json.dumps(thought)}\n\n{scripted_stream(HELLO)}")
    send(page, "Hello")
    wait(page)
    thoughts = page.locator(".thoughts .markdown")
    assert not thoughts.is_visible()
    page.get_by_text("Thoughts").click()
    assert thoughts.inner_text() == "They say hello."
    send(page, "Again")
    wait(page)
    assert [message["content"] for message in asked[1]["messages"]] == ["Hello", "Hello world!", "Again"]


def test_a_growing_answer_is_followed_until_somebody_scrolls_up(page: Any) -> None:
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


def test_numbers_are_there_while_the_answer_comes(page: Any) -> None:
    script_slowly(page, scripted_stream([(["a", "b"], ["a"], 1)] * 60), pause_ms=30)
    send(page)
    until(page, lambda: page.locator(".strip .step").count() > 5)
    assert page.get_by_role("button", name="Stop").is_visible()
    numbers = page.locator(".numbers dd").all_text_contents()
    assert float(numbers[0]) > 0
    assert numbers[1] == "2.00"
    wait(page)
    assert page.locator(".numbers dd").all_text_contents()[0] == "236", "118 tokens behind the first step in half a second, the server says"
