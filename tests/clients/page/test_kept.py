"""Chats that a browser keeps: listed, searched, exported, deleted, with their branches; or not kept at all."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.page_driver import STORED, Step, ask, open_settings, script, scripted_stream, send, show_tokens, until, wait

FIRST: Sequence[Step] = [(["Hel"], [], 0), (["lo", " **first**"], ["lo"], 1)]
SECOND: Sequence[Step] = [(["Hello", " second"], [], 0)]


def talk(page: Any, *texts: str) -> None:
    """Begin a chat for each of these messages."""
    for text in texts:
        if page.locator(".turn").count():
            page.get_by_role("button", name="New chat").click()
        ask(page, text)


def titles(page: Any) -> list[str]:
    found: list[str] = page.locator(".chats .title").all_text_contents()
    return found


def shown(page: Any) -> list[str]:
    found: list[str] = page.locator(".typed, .answer .markdown").all_inner_texts()
    return found


def test_reloaded_page_restores_chats_with_tokens_and_settings(page: Any) -> None:
    script(page, scripted_stream(FIRST))
    open_settings(page)
    page.get_by_label("System prompt").fill("Be short.")
    talk(page, "One")
    until(page, lambda: titles(page) == ["One"])
    page.reload()
    until(page, lambda: shown(page) == ["One", "Hello first"])
    show_tokens(page)
    assert page.locator(".strip .step").all_text_contents() == ["Hel", "lo **first**"]
    page.get_by_role("button", name="Settings", exact=True).click()
    assert page.get_by_label("System prompt").input_value() == "Be short."
    asked = script(page, scripted_stream(SECOND))
    ask(page, "Two")
    assert [message["content"] for message in asked[0]["messages"]] == ["Be short.", "One", "Hello **first**", "Two"]


def test_page_lists_chats_and_finds_them_by_their_words(page: Any) -> None:
    script(page, scripted_stream(FIRST), scripted_stream(SECOND))
    talk(page, "Apples", "Pears\nand more of them")
    until(page, lambda: titles(page) == ["Pears", "Apples"])
    search = page.get_by_label("Search chats")
    for words, found in {"pea": ["Pears"], "MORE them": ["Pears"], "first": ["Apples"], "hello": ["Pears", "Apples"], "plums": []}.items():
        search.fill(words)
        until(page, lambda: titles(page) == found)  # noqa: B023
    assert page.get_by_text("No chat has these words.").is_visible()
    search.fill("")
    page.locator(".chats .open", has_text="Apples").click()
    until(page, lambda: shown(page) == ["Apples", "Hello first"])
    assert page.locator("[aria-current=true]").inner_text().startswith("Apples")


def test_page_asks_before_deleting_a_chat(page: Any) -> None:
    script(page, scripted_stream(FIRST))
    talk(page, "One", "Two", "Three")
    until(page, lambda: len(titles(page)) == 3)
    page.get_by_role("button", name="Delete “Two”").click()
    page.get_by_role("button", name="Cancel").click()
    assert len(titles(page)) == 3
    page.get_by_role("button", name="Delete “Three”").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    until(page, lambda: titles(page) == ["Two", "One"])
    assert page.locator(".turn").count() == 0, "it was open"
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    until(page, lambda: titles(page) == [])
    assert page.evaluate(STORED) == "[[],[]]"
    page.reload()
    page.get_by_text("No chats yet.").wait_for()


def test_page_stores_no_chat_if_keep_chats_is_off(page: Any) -> None:
    script(page, scripted_stream(FIRST))
    open_settings(page)
    page.get_by_label("Keep chats").uncheck()
    talk(page, "One")
    page.wait_for_timeout(600)
    assert titles(page) == ["One"], "it can be exported"
    assert page.evaluate(STORED) == "[[],[]]"
    page.reload()
    page.get_by_text("New chats are not kept").wait_for()
    assert page.locator(".turn").count() == 0


def test_page_reports_failed_browser_storage_and_the_chat_continues(open_page: Any, server: Any) -> None:
    page = open_page(server.url, expects_faults=True)
    page.evaluate("() => { IDBDatabase.prototype.transaction = () => { throw new Error('the disk is full') } }")
    script(page, scripted_stream(FIRST))
    talk(page, "One")
    page.get_by_text("Chats are not kept: the disk is full.").wait_for()
    assert shown(page) == ["One", "Hello first"]


def test_page_exports_a_chat_as_markdown_and_as_json(page: Any, tmp_path: Path) -> None:
    script(page, scripted_stream(FIRST), scripted_stream(SECOND))
    open_settings(page)
    page.get_by_label("System prompt").fill("Be short.")
    talk(page, "What is *this*?")
    page.get_by_role("button", name="Retry").click()
    until(page, lambda: page.get_by_text("2 / 2").count() == 1)
    wait(page)
    texts = {}
    for kind, name in {"Markdown": "What-is-this-.md", "JSON": "What-is-this-.json"}.items():
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Export as {kind}").click()
        assert download.value.suggested_filename == name
        download.value.save_as(tmp_path / name)
        texts[kind] = (tmp_path / name).read_text(encoding="utf-8")
    heading, _, *parts = texts["Markdown"].split("\n\n")
    assert heading == "# What is *this*?"
    assert parts == ["## System prompt", "Be short.", "## You", "What is *this*?", "## mini", "Hello second\n"]
    exported = json.loads(texts["JSON"])
    assert [message["content"] for message in exported["messages"]] == ["Be short.", "What is *this*?", "Hello second"]
    answers = [node["answer"] for node in exported["chat"]["nodes"] if node["role"] == "assistant"]
    assert [answer["text"] for answer in answers] == ["Hello **first**", "Hello second"], "every branch"
    assert [token["id"] for step in answers[0]["steps"] for token in step["tokens"]] == [100, 101, 102]


def test_page_shows_earlier_versions_of_messages_and_answers(page: Any) -> None:
    asked = script(page, scripted_stream(FIRST), scripted_stream(SECOND), scripted_stream([(["Third"], [], 0)]))
    talk(page, "One")
    page.get_by_role("button", name="Retry").click()
    until(page, lambda: shown(page) == ["One", "Hello second"])
    wait(page)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("Other")
    page.keyboard.press("Enter")
    until(page, lambda: shown(page) == ["Other", "Third"])
    wait(page)
    page.get_by_role("button", name="Previous version").click()
    until(page, lambda: shown(page) == ["One", "Hello second"])
    page.get_by_role("button", name="Previous version").last.click()
    until(page, lambda: shown(page) == ["One", "Hello first"])
    page.wait_for_timeout(500)
    page.reload()
    until(page, lambda: shown(page) == ["One", "Hello first"])
    ask(page, "Two")
    assert [message["content"] for message in asked[-1]["messages"]] == ["One", "Hello **first**", "Two"]


def test_chat_edited_in_two_tabs_keeps_all_its_turns(page: Any) -> None:
    script(page, scripted_stream(FIRST))
    talk(page, "One")
    until(page, lambda: titles(page) == ["One"])
    other = page.context.new_page()
    other.goto(page.url)
    other.locator(".chats .open").click()
    until(other, lambda: shown(other) == ["One", "Hello first"])
    for tab, text in ((other, "From the second"), (page, "From the first")):
        script(tab, scripted_stream(SECOND))
        ask(tab, text)
        tab.wait_for_timeout(500)
    page.reload()
    until(page, lambda: shown(page)[-2:] == ["From the first", "Hello second"])
    page.get_by_role("button", name="Previous version").click()
    until(page, lambda: shown(page)[-2:] == ["From the second", "Hello second"])


def test_page_marks_an_answer_cut_by_a_reload_as_stopped(page: Any) -> None:
    page.evaluate(
        """body => {
          window.fetch = async () => new Response(new ReadableStream({
            start: controller => controller.enqueue(new TextEncoder().encode(body)),
          }));
        }""",
        scripted_stream(FIRST, finish_reason=None),
    )
    send(page, "One")
    until(page, lambda: "Hello" in page.evaluate(STORED))
    page.reload()
    until(page, lambda: shown(page) == ["One", "Hello first"])
    assert page.get_by_text("Stopped.", exact=True).is_visible()
    assert page.get_by_role("button", name="Retry").is_enabled()


def test_page_does_not_request_a_stored_model_that_is_gone(page: Any) -> None:
    kept = json.dumps({"settings": {"model": "gone", "drafter": "gone", "temperature": "0.5"}})
    page.evaluate("kept => localStorage.setItem('paceline-preferences', kept)", kept)
    page.reload()
    until(page, lambda: page.locator(".model").inner_text() == "mini")
    asked = script(page, scripted_stream(FIRST))
    ask(page, "One")
    assert (asked[0]["model"], asked[0]["speculation"], asked[0]["temperature"]) == ("mini", {"trees": True}, 0.5)
