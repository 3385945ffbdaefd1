"""The page by keyboard, by screen reader, on a narrow screen, in light and dark."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from harness.page_driver import Step, ask, compare, open_settings, script, scripted_stream, show_tokens, until, wait

NARROW = {"viewport": {"width": 390, "height": 844}}
LONG: Sequence[Step] = [
    (["W" * 90], [], 0),
    ([" long", "est" * 30, " of", " all"], [" long", "est" * 30, " of", " them"], 3),
    (["\n```python\n", "def code_(): # " + "code_" * 40 + "\n    return 'text', 12, None", "\n```\n"], [], 0),
    (["https://example.com/" + "a" * 120], [], 0),
    (["\n\n| a | b | c |\n|---|---|---|\n| " + "wide " * 9 + "| " + "b" * 60 + " | c |\n"], [], 0),
]
CONTROLS = "a[href], button, input, select, textarea, summary, [tabindex], [role=button]"
# of every text that is seen, and of placeholders, relative luminance and contrast as WCAG 2 defines them; colours come as rgb() or,
# mixed, as color(srgb …)
CONTRASTS = """nodes => {
  const channels = text => {
    const numbers = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith("rgb") ? [...numbers.slice(0, 3).map(value => value / 255), numbers[3] ?? 1] : [...numbers.slice(0, 3), 1];
  };
  const luminance = colour => channels(colour).slice(0, 3)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  const contrast = (node, pseudo) => {
    let ground = node;
    while (channels(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement;
    const colours = [getComputedStyle(node, pseudo).color, getComputedStyle(ground).backgroundColor];
    const [light, dark] = colours.map(luminance).sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
  };
  const hasText = node => [...node.childNodes].some(child => child.nodeType === Node.TEXT_NODE && child.textContent.trim());
  const seen = nodes.filter(node => node.checkVisibility() && !node.matches(":disabled, option"));
  const fields = seen.filter(node => node.matches("input, textarea"));
  return [
    ...[...seen.filter(hasText), ...fields].map(node => [node.outerHTML.slice(0, 99), contrast(node, "")]),
    ...fields.map(node => [node.id + "::placeholder", contrast(node, "::placeholder")]),
  ];
}"""
TOO_WIDE = """nodes => nodes.filter(node => !node.closest('.scrolls, .strip, pre') && node.getBoundingClientRect().right > 390.5)
  .map(node => node.outerHTML)"""
# its label, its aria-label, or the text of it that is read out
NAMELESS = """nodes => nodes.filter(node => {
  const copy = node.cloneNode(true);
  for (const hidden of copy.querySelectorAll("[aria-hidden=true]")) hidden.remove();
  return !(node.ariaLabel || node.labels?.length || copy.textContent.trim());
}).map(node => node.outerHTML)"""


def states(page: Any) -> Any:
    """The page empty, with its settings, answered with a tree open, compared, while a message is edited, and with its chats."""
    yield "empty"
    open_settings(page)
    page.get_by_label("JSON schema of").fill("{")
    yield "settings"
    page.get_by_role("button", name="Reset the settings").click()
    page.keyboard.press("Escape")
    script(page, scripted_stream(LONG))
    ask(page, "A question " + "that is long " * 9 + "y" * 99)
    show_tokens(page)
    page.locator(".strip .step").nth(1).click()
    yield "answered"
    page.get_by_role("button", name="Retry").click()
    wait(page)
    compare(page)
    page.locator(".ids > summary").click()
    yield "compared"
    page.get_by_role("button", name="Edit").click()
    yield "edited"
    page.keyboard.press("Control+k")
    page.get_by_role("button", name="Delete “").click()
    yield "chats"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_has_no_horizontal_overflow_on_a_narrow_screen(open_page: Any, server: Any, scheme: str) -> None:
    page = open_page(server.url, color_scheme=scheme, **NARROW)
    for state in states(page):
        width, seen = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert (width, seen) == (390, 390), state
        wide = page.locator("button:visible, input:visible, select:visible, textarea:visible").evaluate_all(TOO_WIDE)
        assert wide == [], state


def test_page_controls_have_labels_and_element_ids_are_unique(page: Any) -> None:
    for state in states(page):
        nameless = page.locator(CONTROLS).evaluate_all(NAMELESS)
        assert nameless == [], state
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
        assert len(ids) == len(set(ids))
        fields = page.locator("input, select, textarea").evaluate_all(
            "nodes => nodes.map(node => node.labels.length + (node.ariaLabel ? 1 : 0))"
        )
        assert 0 not in fields
        orders = page.locator("[tabindex]").evaluate_all("nodes => nodes.map(node => node.tabIndex)")
        assert set(orders) <= {0, -1}, "the order of the focus is that of the page"


def test_page_has_landmarks_headings_and_one_status_line(page: Any) -> None:
    assert page.locator("html").get_attribute("lang") == "en"
    script(page, scripted_stream(LONG))
    ask(page)
    for role, count in {"main": 1, "banner": 1, "status": 1, "article": 2}.items():
        assert page.get_by_role(role).count() == count, role
    levels = page.locator("h1, h2, h3").evaluate_all("nodes => nodes.map(node => node.tagName)")
    assert levels == ["H1", "H2", "H2", "H2"]
    assert page.locator("[aria-live], [role=status], [role=alert], [role=log]").count() == 1, "one line is read out, not every token"
    assert page.get_by_role("status").inner_text() == "The answer is there: 10 tokens."
    show_tokens(page)
    legend = page.get_by_label("Where tokens came from")
    assert legend.locator("li").all_text_contents() == ["accepted", "bonus", "plain"]


def test_token_origins_on_the_page_have_different_underlines(page: Any) -> None:
    lines = page.locator(".long-legend .token").evaluate_all("nodes => nodes.map(node => getComputedStyle(node).borderBottomStyle)")
    assert lines == ["solid", "double", "dotted"]


def test_page_conversation_works_with_the_keyboard_only(page: Any) -> None:
    script(page, scripted_stream(LONG))
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("One line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    page.keyboard.press("Enter")
    wait(page)
    assert page.locator(".typed").inner_text() == "One line\nand another"
    assert page.evaluate("document.activeElement.id") == "message"
    go_to(page, "10 tokens", "Shift+Tab")
    page.keyboard.press("Enter")
    go_to(page, "Step 1", "Tab")
    page.keyboard.press("ArrowRight")
    assert focused(page).startswith("Step 2")
    page.keyboard.press("Enter")
    assert page.get_by_role("region", name="Draft tree of step 2").is_visible()
    page.keyboard.press("End")
    assert focused(page).startswith("Step 5")
    page.keyboard.press("Home")
    assert focused(page).startswith("Step 1")
    page.keyboard.press("ArrowLeft")
    assert focused(page).startswith("Step 1")
    page.keyboard.press("Tab")
    assert focused(page) == "Close the draft tree"
    page.keyboard.press("Escape")
    assert page.locator(".tree").count() == 0
    assert focused(page).startswith("Step 1")
    go_to(page, "Retry", "Tab")
    page.keyboard.press("Enter")
    wait(page)
    assert page.evaluate("document.activeElement.id") == "message", "the focus is not lost with the button"
    go_to(page, "Edit", "Shift+Tab")
    page.keyboard.press("Enter")
    assert focused(page) == "Edit the message"
    page.keyboard.press("Escape")
    assert focused(page) == "Edit"
    go_to(page, "Skip to the message", "Shift+Tab")
    page.keyboard.press("Enter")
    page.keyboard.type("?")
    assert page.get_by_label("Message", exact=True).input_value() == "?"


def test_page_chats_are_deleted_with_the_keyboard_and_keep_the_focus(page: Any) -> None:
    script(page, scripted_stream([(["Hello"], [], 0)]))
    for text in ("One", "Two"):
        page.keyboard.press("Control+Shift+O")
        ask(page, text)
    until(page, lambda: page.locator(".chats .title").all_text_contents() == ["Two", "One"])
    page.keyboard.press("Control+k")
    go_to(page, "Delete “One”", "Tab")
    for key in ("Escape", "Enter"):  # the question has the focus on its harmless button
        page.keyboard.press("Enter")
        until(page, lambda: focused(page) == "Cancel")
        page.keyboard.press(key)
        until(page, lambda: focused(page) == "Delete “One”")
    page.keyboard.press("Enter")
    go_to(page, "Delete", "Tab")
    page.keyboard.press("Enter")
    until(page, lambda: page.locator(".chats .title").all_text_contents() == ["Two"])
    assert focused(page) == "Search chats"
    go_to(page, "Two", "Tab")
    page.keyboard.press("Enter")
    assert page.locator(".turn").count() == 2


def focused(page: Any) -> str:
    found: str = page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent")
    return found


def go_to(page: Any, name: str, key: str) -> None:
    for _ in range(40):
        if focused(page).startswith(name):
            return
        page.keyboard.press(key)
    raise AssertionError(f"{name} is not reached with {key}")


def test_focused_page_control_has_an_outline(page: Any) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle + getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "solid2px"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_text_contrast_is_at_least_4_5(open_page: Any, server: Any, scheme: str) -> None:
    page = open_page(server.url, color_scheme=scheme)
    for state in states(page):
        contrasts = page.locator("body *").evaluate_all(CONTRASTS)
        assert len(contrasts) > 20
        assert [(text, contrast) for text, contrast in contrasts if contrast < 4.5] == [], state


def test_page_theme_follows_the_system_until_the_switch_sets_it(open_page: Any, server: Any) -> None:
    page = open_page(server.url, color_scheme="dark")
    dark = ground(page)
    assert max(dark) < 60
    page.emulate_media(color_scheme="light")
    light = ground(page)
    assert min(light) > 200
    switch = page.get_by_role("button", name="Theme:")
    for name, expected in (("light", light), ("dark", dark)):
        switch.click()
        assert switch.get_attribute("aria-label").startswith(f"Theme: {name}")
        assert ground(page) == expected
    page.reload()
    page.get_by_role("button", name="Theme: dark").wait_for()
    assert ground(page) == dark
    switch.click()
    assert switch.get_attribute("aria-label").startswith("Theme: system")
    assert ground(page) == light


def ground(page: Any) -> list[int]:
    """The colour behind everything."""
    return [int(value) for value in re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))]


# the focused element: [its index among all elements, its outline, whether nothing covers its middle, its markup]
FOCUS = """() => {
  const node = document.activeElement;
  const box = node.getBoundingClientRect();
  const [x, y] = [box.x + box.width / 2, Math.min(box.y + box.height / 2, innerHeight - 1)];
  const top = document.elementFromPoint(x, y);
  const style = getComputedStyle(node);
  const isSeen = top !== null && (node.contains(top) || top.contains(node));
  return [[...document.querySelectorAll("*")].indexOf(node), style.outlineStyle + style.outlineWidth, isSeen, node.outerHTML.slice(0, 99)];
}"""


# all that Tab should reach, in the order of the page
REACHABLE = """nodes => nodes.filter(node => node.tabIndex >= 0 && !node.disabled && !node.closest("[inert]") && node.checkVisibility())
  .map(node => [...document.querySelectorAll("*")].indexOf(node))"""


@pytest.mark.parametrize("width", [390, 1200])
def test_tab_key_visits_page_controls_in_order_with_a_visible_outline(open_page: Any, server: Any, width: int) -> None:
    page = open_page(server.url, viewport={"width": width, "height": 844})
    script(page, scripted_stream([*LONG, (["\n\nline\n\n"] * 40, [], 0)]))
    ask(page, "A question")
    show_tokens(page)
    assert len(visited(page)) >= 10
    compare(page)
    open_settings(page)  # next to the list of chats on the wide screen, over the conversation on the narrow one
    assert len(visited(page)) >= 20


def visited(page: Any) -> list[int]:
    """The places that Tab reaches from the first to the last one: all controls, each with an outline and in sight."""
    page.get_by_role("link", name="Skip to the message").focus()
    first, *expected = page.locator(CONTROLS).evaluate_all(REACHABLE)
    places = [first]
    while True:
        page.keyboard.press("Tab")
        place, outline, is_seen, markup = page.evaluate(FOCUS)
        if place <= places[-1]:
            break
        places.append(place)
        assert outline == "solid2px", markup
        assert is_seen, markup
    assert places == [first, *expected]
    return places
