"""What a hostile text, a refusing server and a broken connection do to the page: nothing, a sentence, a sentence."""

import json
from typing import Any

import pytest

from harness.page_driver import CHAT, STORED, TAXI, ask, open_settings, record, script, scripted_stream, send, show_tokens, until, wait

KEY = "key-of-the-page's-own"
HOSTILE = """<img src=x onerror="window.pwned=1"><script>window.pwned=1</script><svg onload="window.pwned=1">
<a href="javascript:window.pwned=1">tag</a> <style>*{display:none}</style> <iframe srcdoc="<script>parent.pwned=1</script>"></iframe>

[script](javascript:window.pwned=1) [SCRIPT](JaVaScRiPt:window.pwned=1) [encoded](&#106;avascript:window.pwned=1)
[tab](java\tscript:window.pwned=1) [vb](vbscript:x) [data](data:text/html,<script>window.pwned=1</script>) [file](file:///etc/passwd)
[relative](/v1/models) ![picture](http://127.0.0.1:9/pixel.png) ![own](/page/icon.svg)
[web](https://example.com/a?b=1) <https://example.com/auto> https://example.com/bare

```html
<script>window.pwned=1</script>
```

`<b>code</b>` **bold**

| head |
|---|
| <img src=x onerror="window.pwned=1"> |
"""


def test_page_escapes_html_in_answers_and_allows_only_web_links(page: Any) -> None:
    script(page, scripted_stream([([HOSTILE], [], 0)]))
    ask(page)
    answer = page.locator(".markdown")
    assert answer.locator("img, script, svg, style, iframe, object, form, input, [style], [onerror], [onload]").count() == 0
    links = answer.locator("a")
    assert links.evaluate_all("nodes => nodes.map(node => node.getAttribute('href'))") == [
        "http://127.0.0.1:9/pixel.png",  # a link to the picture, which is not loaded
        "https://example.com/a?b=1",
        "https://example.com/auto",
        "https://example.com/bare",
    ]
    assert links.evaluate_all("nodes => nodes.map(node => node.target + ' ' + node.rel)") == ["_blank noopener noreferrer nofollow"] * 4
    assert answer.locator("pre code").inner_text() == "<script>window.pwned=1</script>\n"
    assert answer.locator("p > code").inner_text() == "<b>code</b>"
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("td").inner_text() == '<img src=x onerror="window.pwned=1">'
    assert '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>' in answer.inner_text()
    assert "[script](javascript:window.pwned=1)" in answer.inner_text()
    assert "!picture" in answer.inner_text()
    show_tokens(page)
    assert page.locator(".strip .token").inner_text() == HOSTILE.replace("\n", "↵").replace("\t", "→")
    assert page.evaluate("window.pwned") is None


def test_page_escapes_html_in_user_messages(page: Any) -> None:
    asked = record(page)
    ask(page, HOSTILE)
    assert asked[0]["messages"][0]["content"] == HOSTILE.strip()
    assert page.locator(".typed").evaluate("node => node.textContent") == HOSTILE.strip()
    assert page.locator(".typed *").count() == 0
    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Edit the message").input_value() == HOSTILE.strip()
    assert page.evaluate("window.pwned") is None


def test_content_security_policy_blocks_injected_page_code(open_page: Any, server: Any) -> None:
    page = open_page(server.url, expects_faults=True)
    raised = {
        "() => document.body.append(Object.assign(document.createElement('script'), {text: 'window.pwned = 1'}))": "TrustedScript",
        "() => { document.body.innerHTML = '<img src=x onerror=\"window.pwned = 1\">' }": "TrustedHTML",
        "() => document.createElement('img').setAttribute('onerror', 'window.pwned = 1')": "TrustedScript",
        "() => fetch('http://127.0.0.1:9/').then(() => { window.pwned = 1 })": "fetch",
    }
    for code, reason in raised.items():
        with pytest.raises(Exception, match=reason):
            page.evaluate(code)
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None


def test_page_asks_for_the_api_key_and_keeps_it_in_one_tab(open_page: Any, serve: Any, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text(KEY, encoding="utf-8")
    server = serve("--api-key-file", str(tmp_path / "keys"))
    page = open_page(server.url, expects_faults=True, viewport={"width": 360, "height": 740})
    alert = page.get_by_role("alert")
    assert alert.inner_text().startswith("This server asks for an API key")
    field = page.get_by_label("API key")
    assert field.get_attribute("type") == "password"
    field.fill("a key that is none")
    page.get_by_role("button", name="Use key").click()
    assert alert.inner_text().startswith("This server asks for an API key")
    field.fill(KEY)
    page.keyboard.press("Enter")
    alert.wait_for(state="detached")
    page.keyboard.press("Escape")
    ask(page)
    assert page.locator(".markdown").inner_text() != ""
    assert KEY not in page.url
    until(page, lambda: TAXI in page.evaluate(STORED))
    assert KEY not in page.evaluate(STORED)
    assert page.evaluate("JSON.stringify(localStorage) + document.cookie") == "{}"
    page.reload()
    until(page, lambda: page.locator(".model").inner_text() == "mini")
    other = open_page(server.url, expects_faults=True)
    assert other.get_by_label("API key").input_value() == ""


def test_page_shows_the_error_message_of_the_server(open_page: Any, server: Any) -> None:
    page = open_page(server.url, expects_faults=True)
    open_settings(page)
    page.get_by_label("Temperature").fill("-1")
    ask(page)
    alert = page.locator(".answer").get_by_role("alert")
    assert "The server refused: temperature: -1.0 is out of range" in alert.inner_text()
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Retry").click()
    alert.wait_for(state="detached")
    wait(page)
    assert page.locator(".markdown").inner_text() != ""


def test_page_shows_a_stream_error_below_the_partial_answer(page: Any) -> None:
    begun = scripted_stream([(["Half"], [], 0)], finish_reason=None)
    script(page, begun + 'data: {"error": {"message": "the answer was not finished within 1 s"}}\n\n', scripted_stream([(["All"], [], 0)]))
    ask(page)
    assert page.get_by_role("alert").inner_text().startswith("The server refused: the answer was not finished within 1 s.")
    assert page.locator(".markdown").inner_text() == "Half"
    page.get_by_role("button", name="Retry").click()
    until(page, lambda: page.locator(".markdown").inner_text() == "All")
    assert page.get_by_role("alert").count() == 0


def test_page_reports_a_stream_that_ends_early_as_lost_connection(page: Any) -> None:
    script(page, scripted_stream([(["Half"], [], 0)], finish_reason=None))
    ask(page)
    assert page.get_by_role("alert").inner_text().startswith("The connection was lost: the stream ended before the answer did.")


def test_page_keeps_the_partial_answer_when_the_server_dies(open_page: Any, serve: Any) -> None:
    server = serve()
    page = open_page(server.url, expects_faults=True)
    page.route(CHAT, lambda route: route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True})))
    open_settings(page)
    page.get_by_label("Max tokens").fill("1800")
    send(page)
    show_tokens(page)
    page.locator(".strip .step").nth(5).wait_for()
    server.kill()
    wait(page)
    alert = page.get_by_role("alert")
    assert alert.inner_text().startswith("The connection was lost")
    text = page.locator(".markdown").inner_text()
    assert text != ""
    assert page.locator(".strip .token").count() >= 6
    page.get_by_role("button", name="Retry").click()
    until(page, lambda: "The connection was lost: the server cannot be reached" in page.locator(".answer").inner_text())
    serve(port=server.port)
    page.get_by_label("Max tokens").fill("20")
    page.get_by_role("button", name="Retry").click()
    until(page, lambda: page.locator(".tokens").count() == 1 and page.get_by_role("button", name="Retry").count() == 1)
    assert page.locator(".answer").get_by_role("alert").count() == 0
