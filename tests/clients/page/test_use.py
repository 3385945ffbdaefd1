"""What makes the page one to live with: the race, code, files, shortcuts, its installation, and life without a server."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.page_driver import ask, compare, open_settings, record, script, script_slowly, scripted_stream, send, until, wait

ADD = "def add(first, second):\n    return first + second  # the sum\n"
CODE = f'```python\n{ADD}```\n\n```\nplain <b>text</b>\n```\n\n```nonsense"><i>\nx\n```\n'
KEPT_PATHS = """async () => {
  const cache = await caches.open((await caches.keys())[0]);
  return (await cache.keys()).map(request => new URL(request.url).pathname);
}"""


def test_page_race_shows_both_answers_at_their_own_speed(page: Any) -> None:
    drafted = scripted_stream([(["a", "b", "c"], ["a", "b"], 2)] * 10)
    plain = scripted_stream([([letter], [], 0) for letter in "abc" * 10])
    script_slowly(page, drafted, pause_ms=200)
    ask(page)
    script_slowly(page, plain, pause_ms=200)
    page.get_by_role("button", name="Compare without drafts").click()
    verdict = page.locator(".verdict")
    until(page, lambda: "token ids, all the same so far" in verdict.inner_text())
    num_tokens = "nodes => nodes.map(node => node.querySelectorAll('.token').length)"
    lanes = page.locator(".lane")
    until(page, lambda: 3 < lanes.evaluate_all(num_tokens)[0] < 30)
    ahead, behind = lanes.evaluate_all(num_tokens)
    assert ahead > behind, "the drafted answer is shown at the pace at which it came"
    until(page, lambda: verdict.inner_text().startswith("✓ The same 30 token ids"))
    assert lanes.evaluate_all(num_tokens) == [30, 30]
    assert lanes.locator("progress").evaluate_all("nodes => nodes.map(node => [node.value, node.max])") == [[30, 30]] * 2
    page.get_by_role("button", name="10 × slower").click()
    until(page, lambda: 3 <= lanes.evaluate_all(num_tokens)[0] < 15)
    page.get_by_role("button", name="Replay").click()
    until(page, lambda: lanes.evaluate_all(num_tokens) == [30, 30])


@pytest.mark.parametrize("viewport", [{"width": 1200, "height": 800}, {"width": 390, "height": 844}], ids=["wide", "narrow"])
def test_page_race_fits_on_one_screen(open_page: Any, server: Any, viewport: dict[str, int]) -> None:
    page = open_page(server.url, viewport=viewport)
    script(page, scripted_stream([(["word "] * 3, ["word "] * 2, 2)] * 80))
    ask(page)
    compare(page)
    left, right = page.locator(".lane").evaluate_all("nodes => nodes.map(node => node.getBoundingClientRect().toJSON())")
    assert (left["top"] == right["top"]) == (viewport["width"] > 390), "side by side where there is room"
    top = page.locator("header.top").evaluate("node => node.getBoundingClientRect().bottom")
    for part in (".verdict", ".lane:first-child", ".lane:last-child"):
        box = page.locator(part).bounding_box()
        assert top <= box["y"], part
        assert box["y"] + box["height"] <= page.locator(".composer textarea").bounding_box()["y"], part


def test_page_highlights_code_and_copies_it_unchanged(open_page: Any, server: Any) -> None:
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    script(page, scripted_stream([([CODE], [], 0)]))
    ask(page)
    blocks = page.locator(".markdown .code")
    assert blocks.locator("code").all_text_contents() == [ADD, "plain <b>text</b>\n", "x\n"]
    assert blocks.locator(".code-head span").all_text_contents() == ["python", "", 'nonsense"><i>']
    assert blocks.nth(0).locator(".hljs-keyword").all_text_contents() == ["def", "return"]
    assert blocks.nth(1).locator("code *").count() == 0
    colours = [blocks.nth(0).locator(part).first.evaluate("node => getComputedStyle(node).color") for part in ("code", ".hljs-keyword")]
    assert colours[0] != colours[1]
    page.get_by_role("button", name="Copy code").first.click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == ADD


def test_text_file_attached_on_the_page_is_sent_in_the_message(page: Any) -> None:
    asked = script(page, scripted_stream([(["Read"], [], 0)]))
    notes = {"name": "notes.md", "mimeType": "text/markdown", "buffer": b"One\n```\ncode\n```\n"}
    words = {"name": "words.txt", "mimeType": "text/plain", "buffer": "Grüße".encode()}
    page.get_by_label("Text files", exact=True).set_input_files([notes, words])
    page.get_by_role("button", name="Remove words.txt").click()
    ask(page, "Sum it up.")
    assert asked[0]["messages"] == [{"role": "user", "content": "Sum it up.\n\nnotes.md:\n````\nOne\n```\ncode\n```\n````"}]
    assert page.get_by_label("Attached files").count() == 0
    page.locator(".file summary").click()
    assert page.locator(".file pre").inner_text() == "One\n```\ncode\n```\n"
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("Sum it up shorter.")
    page.keyboard.press("Enter")
    until(page, lambda: len(asked) == 2)
    assert asked[1]["messages"][0]["content"].startswith("Sum it up shorter.\n\nnotes.md:\n````\nOne")


def test_page_refuses_binary_and_too_long_attachments(page: Any) -> None:
    chooser = page.get_by_label("Text files", exact=True)
    binary = {"name": "image.png", "mimeType": "image/png", "buffer": b"\x89PNG\x00"}
    long = {"name": "long.txt", "mimeType": "text/plain", "buffer": b"x" * 1_000_001}
    fine = {"name": "fine.txt", "mimeType": "text/plain", "buffer": b"y"}
    chooser.set_input_files([binary, long, fine])
    page.get_by_label("Attached files").wait_for()
    said = page.get_by_role("alert").inner_text()
    assert said == "Not attached: image.png is not a text file in UTF-8; long.txt has 1.0 MB; a file may have 1.0 MB."
    assert page.get_by_label("Attached files").locator("li").count() == 1


def test_text_file_dropped_on_the_page_message_is_attached(page: Any) -> None:
    dropped = page.evaluate_handle(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["One"], "notes.txt", {type: "text/plain"}));
          return data;
        }"""
    )
    page.get_by_label("Message", exact=True).dispatch_event("drop", {"dataTransfer": dropped})
    page.get_by_label("Attached files").get_by_text("notes.txt 3 bytes").wait_for()


def test_page_header_stays_visible_while_scrolling(page: Any) -> None:
    script(page, scripted_stream([(["line\n\n"], [], 0)] * 80))
    ask(page)
    page.mouse.move(600, 400)
    page.mouse.wheel(0, 800)
    until(page, lambda: page.evaluate("scrollY") > 300)
    assert page.locator("header.top").bounding_box()["y"] == 0


def test_page_keyboard_shortcuts_and_escape_move_the_focus(open_page: Any, server: Any) -> None:
    page = open_page(server.url, viewport={"width": 390, "height": 844})
    script(page, scripted_stream([(["Hello"], [], 0)]))
    ask(page)
    focused = "document.activeElement.ariaLabel || document.activeElement.id"
    page.keyboard.press("Control+k")
    assert page.evaluate(focused) == "Search chats"
    assert page.locator("main").evaluate("node => node.inert"), "what is covered takes no focus"
    page.keyboard.press("Escape")
    assert page.locator(".panel").count() == 0
    assert page.evaluate(focused) == "Chats"
    page.get_by_role("button", name="Settings", exact=True).click()
    assert page.evaluate(focused) == "system"
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == "Settings"
    page.keyboard.press("Control+Shift+O")
    until(page, lambda: page.locator(".turn").count() == 0)
    assert page.evaluate(focused) == "message"


def test_page_examples_are_sent_and_answered(page: Any) -> None:
    examples = page.get_by_label("Examples").locator("button")
    asked = record(page)
    texts = examples.all_inner_texts()
    for place, text in enumerate(texts):
        examples.nth(place).click()
        wait(page)
        assert asked[-1]["messages"] == [{"role": "user", "content": text}]
        assert page.get_by_role("alert").count() == 0
        page.get_by_role("button", name="New chat").click()
    assert len(asked) == len(texts) >= 3


def test_page_opens_the_tokens_of_new_answers_if_set(page: Any) -> None:
    script(page, scripted_stream([(["Hello"], [], 0)]))
    ask(page)
    assert page.locator(".strip").count() == 0
    open_settings(page)
    page.get_by_label("Open the tokens of new answers").check()
    send(page)
    until(page, lambda: page.locator(".strip").count() == 1)
    page.reload()
    until(page, lambda: page.locator(".strip").count() == 2)


def test_page_can_be_installed_and_opens_while_the_server_is_down(open_page: Any, serve: Any) -> None:
    server = serve()
    page = open_page(server.url, service_workers="allow", expects_faults=True)
    script(page, scripted_stream([(["Kept"], [], 0)]))
    ask(page, "A question")
    manifest = page.context.new_cdp_session(page).send("Page.getAppManifest")
    assert manifest["errors"] == []
    errors = page.context.new_cdp_session(page).send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert {error["errorId"] for error in errors} <= {"in-incognito"}, "a test's pages are"
    assert json.loads(manifest["data"])["name"] == "paceline"
    page.evaluate("() => navigator.serviceWorker.ready.then(() => true)")
    page.locator(".chats .title").wait_for()
    server.kill()
    page.unroute_all()
    page.reload()
    until(page, lambda: page.locator(".answer .markdown").all_inner_texts() == ["Kept"])
    assert page.get_by_role("alert").inner_text().startswith("the server cannot be reached.")
    kept = page.evaluate(KEPT_PATHS)
    assert {path for path in kept if not path.startswith("/page/")} == {"/"}, "no request of the API is kept"
    page.get_by_label("Message", exact=True).fill("Another")
    page.keyboard.press("Enter")
    page.get_by_text("The connection was lost: the server cannot be reached.").wait_for()
    serve(port=server.port)
    page.get_by_role("button", name="Try again").click()
    until(page, lambda: page.locator(".model").inner_text() == "mini")


def test_service_worker_does_not_hide_another_site_at_the_same_address(open_page: Any, serve: Any) -> None:
    server = serve()
    page = open_page(server.url, service_workers="allow", expects_faults=True)
    page.evaluate("() => navigator.serviceWorker.ready.then(() => true)")
    until(page, lambda: bool(page.evaluate("navigator.serviceWorker.controller !== null")))
    page.context.route(f"{server.url}/", lambda route: route.fulfill(body="<title>another</title>", content_type="text/html"))
    page.reload()
    assert page.title() == "another"


def test_page_sends_completions_to_a_model_without_chat_template(open_page: Any, serve: Any, mini_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(mini_dir, tmp_path / "base")
    for path in (tmp_path / "base").glob("chat_template*"):
        path.unlink()
    config = tmp_path / "base" / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({name: value for name, value in settings.items() if name != "chat_template"}), encoding="utf-8")
    page = open_page(serve("--model", str(tmp_path / "base")).url)
    asked = record(page)
    page.get_by_text("This model has no chat template: it continues the text that it is given.").wait_for()
    open_settings(page)
    page.get_by_label("Max tokens").fill("20")
    page.get_by_label("Examples").locator("button").first.click()
    wait(page)
    assert page.get_by_role("alert").count() == 0
    assert asked[0]["prompt"] == "The sky is blue because"
    compare(page)
    text = page.evaluate("document.querySelector('.answer .markdown').textContent")
    ask(page, "And")
    assert asked[2]["prompt"].startswith("The sky is blue because\n\n")
    assert asked[2]["prompt"].endswith("\n\nAnd")
    assert text.strip() != ""


def test_page_lists_models_with_size_and_requests_the_selected_one(page: Any) -> None:
    loaded = {"id": "small", "drafters": ["ngram"], "meta": {"n_params": 134_515_008, "size": 98_362_432, "quantization": "Q4_1"}}
    adapter = {"id": "tuned", "drafters": ["ngram"], "parent": "small"}
    unloaded = {"id": "other", "drafters": [], "status": {"value": "unloaded"}, "meta": {"quantization": "bf16"}}
    answers = [[loaded, adapter, unloaded]] * 2 + [[loaded, adapter, {**unloaded, "drafters": ["suffix"], "status": {"value": "loaded"}}]]
    listed: list[Any] = []

    def models(route: Any) -> None:
        listed.append(answers[min(len(listed), 2)])
        route.fulfill(json={"object": "list", "data": listed[-1]})

    page.route("**/v1/models", models)
    page.route("**/props?model=*", lambda route: route.fulfill(json={"chat_template": "{{ messages }}"}))
    page.reload()
    until(page, lambda: page.locator(".model").inner_text() == "small")
    open_settings(page)
    options = page.get_by_label("Model").locator("option").all_text_contents()
    assert options == ["small · 135 M parameters · Q4_1 · 98.4 MB", "tuned", "other · bf16"]
    asked = script(page, scripted_stream([(["Hello"], [], 0)]))
    drafters = page.get_by_label("Drafter").locator("option")
    for name, known in {"tuned": ["ngram", "none (plain)"], "other": ["as loaded", "none (plain)"]}.items():
        page.get_by_label("Model").select_option(name)
        assert drafters.all_text_contents() == known
        ask(page)
        assert asked[-1]["model"] == name
        assert page.locator(".answer h2").last.inner_text() == name
    until(page, lambda: len(listed) >= 2)
    ask(page)
    until(page, lambda: drafters.all_text_contents() == ["suffix", "none (plain)"])
