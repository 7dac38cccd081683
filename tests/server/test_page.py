"""The live page in a real browser."""

import threading
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from benchmarks.lib.chromium import find_chromium

from .conftest import NAME, PATIENCE, Server

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
TRUNK = "Every request begins with these words, which fill several pages of the cache. "
SAID = ", ".join(["The trunk is read once"] * 9)
expect.set_options(timeout=PATIENCE * 1000)
# Makes an error of the page of what it tells: that an answer or a request failed, or that the server has gone.
RAISES = """
let failed = NaN;
new MutationObserver(() => {
  const text = (selector) => document.querySelector(selector)?.textContent ?? "";
  const before = failed, gone = text("#state.off");
  failed = parseInt(text("#errors"));
  if (failed > before) throw new Error(`the server failed ${failed - before} requests`);
  if (/^(status|the server does not answer)/.test(gone)) throw new Error(gone);
  if (text(".message.error")) throw new Error(text(".message.error"));
}).observe(document, { subtree: true, childList: true, attributes: true });
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page; afterwards it must have had no error, and have asked no other host. An error closes it, so that no test
    waits for what never comes."""
    page = browser.new_page()
    page.add_init_script(RAISES)
    page.set_default_timeout(PATIENCE * 1000)
    problems: list[str] = []
    hosts: set[str] = set()

    def fail(error: object) -> None:
        problems.append(str(error))
        page.close()

    page.on("pageerror", fail)
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    yield page
    page.close()
    assert not problems and all(host.startswith("127.0.0.1") or host == "," for host in hosts), (problems, hosts)


@pytest.fixture
def looked_at(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, answers that have begun stand still."""
    seen = server.stand_still(monkeypatch)
    yield seen
    seen.set()


def test_the_page_shows_the_forest_and_the_figures(server: Server, page: Page, looked_at: threading.Event) -> None:
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#model")).to_have_text(NAME)
    expect(page.locator("#no-forest")).to_be_visible()
    body = {"prompt": [TRUNK + end for end in "abcd"], "max_tokens": 400, "ignore_eos": True}
    asking = threading.Thread(target=server.post, args=("/v1/completions", body))
    asking.start()
    trunk = page.locator(".node.trunk").first
    expect(trunk).to_be_visible()
    expect(page.locator("#no-forest")).to_be_hidden()
    expect(trunk).to_contain_text(f"{len(TRUNK) // 16 * 16} tokens · shared by 4")  # without hover
    expect(trunk).to_contain_text(TRUNK[:40])
    expect(page.locator("#legend span")).to_have_text(["shared by 4", "one request's own"])
    expect(page.locator("#requests tbody tr")).to_have_count(4)
    assert is_within(page, ".node") and page.evaluate("document.body.scrollWidth <= innerWidth")
    trunk.hover()
    expect(page.locator("#tip")).to_contain_text("4 requests")
    expect(page.locator("#tip")).to_contain_text(TRUNK[:40])
    expect(page.locator("#running")).to_have_text("4")
    looked_at.set()
    asking.join()
    page.mouse.move(0, 0)
    expect(page.locator("#no-forest")).to_be_visible()
    expect(page.locator("#saved")).to_contain_text("×")


def is_within(page: Page, selector: str) -> bool:
    """Whether all boxes are on the page's width."""
    edges = page.locator(selector).evaluate_all(
        "all => all.map(one => one.getBoundingClientRect()).map(at => [at.left, at.right])"
    )
    width = page.evaluate("innerWidth")
    return bool(edges) and all(left >= 0 and right <= width for left, right in edges)


def test_the_forest_fits_a_phone(server: Server, page: Page, looked_at: threading.Event) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(server.url)
    body = {"prompt": [TRUNK + end for end in "abcd"], "max_tokens": 400, "ignore_eos": True}
    asking = threading.Thread(target=server.post, args=("/v1/completions", body))
    asking.start()
    trunk = page.locator(".node.trunk").first
    expect(trunk).to_contain_text("shared by 4")
    assert is_within(page, ".node") and page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert is_within(page, "#requests td")
    looked_at.set()
    asking.join()


def test_a_page_that_opens_late_shows_what_was(server: Server, page: Page) -> None:
    server.post("/v1/completions", {"prompt": [TRUNK + end for end in "abcd"], "max_tokens": 40, "ignore_eos": True})
    server.wait_idle()
    server.wait_for_samples(1)
    page.goto(server.url)
    expect(page.locator("#saved")).to_contain_text("×")
    expect(page.locator("#saved")).to_have_class("read")
    expect(page.locator("#first-token")).to_contain_text("s")
    expect(page.locator("#hits")).to_contain_text("%")


def test_without_sharing_nothing_is_green(start_server: Callable[..., Server], page: Page) -> None:
    server = start_server()
    page.goto(server.url)
    server.post("/v1/completions", {"prompt": "alone", "max_tokens": 20, "ignore_eos": True})
    expect(page.locator("#saved")).to_have_text("1.0×")
    expect(page.locator("#saved-text")).to_contain_text("no KV bytes saved")
    expect(page.locator("#saved")).not_to_have_class("read")


def test_the_charts_follow_the_theme(server: Server, page: Page) -> None:
    script = """colour => { const canvas = document.querySelector("#tokens-chart canvas");
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      for (let i = 0; i < data.length; i += 4)
        if (colour.every((part, at) => data[i + at] === part) && data[i + 3] === 255) return true;
      return false }"""
    light, dark = (0x1F, 0x7A, 0x4D), (0x4C, 0xC3, 0x8A)
    server.wait_for_samples(2)  # a line has two ends
    page.emulate_media(color_scheme="light")
    page.goto(server.url)
    page.wait_for_function(script, arg=light)
    assert not page.evaluate(script, dark)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(script, arg=dark)
    assert not page.evaluate(script, light)


@pytest.fixture(scope="module")
def speaker(start_server: Callable[..., Server]) -> Server:
    """A server whose answers are long: one that is drawn may end with its first token."""
    server = start_server()
    server.say(SAID)
    return server


def test_a_chat_is_answered(speaker: Server, page: Page) -> None:
    page.goto(speaker.url)
    page.fill("#question", "Which part is read once?")
    page.keyboard.press("Enter")
    expect(page.locator(".message.user")).to_have_text("Which part is read once?")
    expect(page.locator(".message.assistant")).not_to_be_empty()
    expect(page.locator("#send")).to_be_visible()
    assert page.locator(".message.assistant").text_content() == SAID


def test_a_stopped_answer_frees_its_pages(speaker: Server, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker.stand_still(monkeypatch)
    page.goto(speaker.url)
    page.fill("#question", "x" * 20)
    page.click("#send")
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    speaker.wait_idle()


def test_markup_in_an_answer_stays_text(server: Server, page: Page) -> None:
    page.goto(server.url)
    page.fill("#question", "<img src=x onerror=alert(1)>")
    page.click("#send")
    expect(page.locator(".message.user")).to_have_text("<img src=x onerror=alert(1)>")
    assert page.locator(".message img").count() == 0


def test_a_key_is_asked_for(start_server: Callable[..., Server], page: Page) -> None:
    server = start_server(api_keys=("a-key",))
    page.add_init_script(
        "window.drawn = []; const draw = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...at) "
        "{ window.drawn.push(text); draw.call(this, text, ...at); }"
    )
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("an API key is needed")
    expect(page.locator("#no-forest")).to_have_text("Nothing is known: an API key is needed.")
    drawn = page.evaluate("window.drawn")
    times = {"-5 min", "-4 min", "-3 min", "-2 min", "-1 min", "now"}
    assert times <= set(drawn) and {"0 B", "500 B", "1.0 kB", "0", "5", "10"} <= set(drawn), drawn
    assert "1 B" not in drawn
    page.fill("#key", "a-key")
    page.locator("#key-form button").click()
    expect(page.locator("#state")).to_have_text("live")


def test_what_the_page_tells_of_a_failure_is_not_waited_for(
    start_server: Callable[..., Server], browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the tests of this file would wait for an answer of an engine that fails."""
    server = start_server()

    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(server.llm.engine.runner, "execute", fails)
    page, told = browser.new_page(), list[str]()
    page.add_init_script(RAISES)
    page.on("pageerror", lambda error: told.append(str(error)))
    page.goto(server.url)
    page.fill("#question", "Which part is read once?")
    page.keyboard.press("Enter")
    expect(page.locator(".message.error")).to_contain_text("RuntimeError: a bug")
    page.close()
    assert any("RuntimeError: a bug" in text for text in told), told
