"""The page in a real browser, from file://, as a reader has it: Chromium of the system, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from symfuse.reports.page import write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this system"),
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed; it comes with the extra `test`"
    )
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page([runs], tmp_path_factory.mktemp("page") / "page.html")


class Seen:
    """What a page said on its console, raised, and asked for."""

    def __init__(self, page: Page) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self.asked.append(request.url))


def opened(browser: Browser, file: Path, **options: Any) -> tuple[Page, Seen]:
    page = browser.new_context(**options).new_page()
    seen = Seen(page)
    page.goto(file.as_uri())
    page.wait_for_selector("html.drawn")
    return page, seen


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Page]:
    page, seen = opened(browser, file, viewport={"width": 1280, "height": 900})
    yield page
    assert seen.said == []
    page.context.close()


def chart(title: str) -> str:
    return f"figure:has(h3:text-is('{title}'))"


def test_it_opens_without_errors_and_asks_for_nothing(browser: Browser, file: Path) -> None:
    page, seen = opened(browser, file)
    assert seen.said == []
    assert [url for url in seen.asked if not url.startswith("data:")] == [file.as_uri()]
    charts, drawn = (page.locator(selector).count() for selector in (".chart", ".chart svg"))
    assert charts == drawn > 10
    for i in range(charts):
        assert page.locator(".chart svg").nth(i).locator("path").count() > 3
        label = page.locator(".chart").nth(i).get_attribute("aria-label")
        assert label == page.locator("figcaption").nth(i).text_content()
    page.context.close()


def test_the_policy_stops_what_the_page_does_not_know(browser: Browser, file: Path) -> None:
    page, _ = opened(browser, file)
    ran = page.evaluate(
        """() => new Promise((done) => {
            const script = document.createElement("script");
            script.textContent = "window.broke = true";
            const stopped = (event) => done([event.violatedDirective, window.broke ?? false]);
            document.addEventListener("securitypolicyviolation", stopped);
            document.body.append(script);
        })"""
    )
    assert ran == ["script-src-elem", False]
    page.context.close()


def test_a_point_says_its_numbers(page: Page, documents: dict[str, dict[str, Any]]) -> None:
    figure = page.locator(chart("The loss along the path"))
    points = figure.locator("g.mark-symbol.role-mark path")
    assert points.count() == sum(len(curve["points"]) for curve in documents["barrier"]["curves"])
    points.nth(5).scroll_into_view_if_needed()
    points.nth(5).hover(force=True)
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    text = tooltip.inner_text()
    assert "loss (nats)" in text
    assert "accuracy" in text
    losses = [f"{point['loss']:.4f}" for curve in documents["barrier"]["curves"] for point in curve["points"]]
    assert any(loss in text for loss in losses)


def test_the_legend_picks_a_curve(page: Page) -> None:
    figure = page.locator(chart("The loss along the path"))
    opacities = "paths => [...new Set(paths.map(p => p.getAttribute('opacity') ?? '1'))].sort()"
    lines = figure.locator("g.mark-line.role-mark path")
    before = lines.evaluate_all(opacities)
    figure.locator("g.role-legend-symbol path").first.click(force=True)
    page.wait_for_timeout(200)
    picked = lines.evaluate_all(opacities)
    assert len(picked) > len(before)
    assert float(min(picked)) < 0.1


def test_a_layer_can_be_chosen(page: Page) -> None:
    figure = page.locator(chart("Heads (h): which became which"))
    cells = "paths => paths.map(p => p.getAttribute('d')).join()"
    marks = figure.locator("g.mark-rect.role-mark path")
    first = marks.evaluate_all(cells)
    assert marks.count() == 4
    figure.locator("select").select_option(label="layer 1")
    page.wait_for_timeout(200)
    assert marks.count() == 4
    assert marks.evaluate_all(cells) != first


def test_dark_is_dark(page: Page) -> None:
    label = page.locator(chart("The loss along the path")).locator("g.role-axis-title text").first
    body = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(body), label.get_attribute("fill")
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector(f"{chart('The loss along the path')} .chart[data-drawn='#16181c']")
    dark = page.evaluate(body), label.get_attribute("fill")
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert dark[0] == "rgb(22, 24, 28)"


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_sticks_out(browser: Browser, file: Path, width: int) -> None:
    page, _ = opened(browser, file, viewport={"width": width, "height": 800})
    page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for i in range(page.locator(".chart svg").count()):
        box = page.locator(".chart svg").nth(i).bounding_box()
        assert box is not None
        assert box["width"] > 200
        assert box["x"] + box["width"] <= width
    page.context.close()


@pytest.mark.parametrize("clipboard", [True, False])
def test_copy_gives_the_numbers(
    browser: Browser, file: Path, documents: dict[str, dict[str, Any]], clipboard: bool
) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    page, seen = opened(browser, file, permissions=permissions)
    if not clipboard:  # as from file:// in some browsers: what is selected is copied
        page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
    page.locator("section:has(h2:text-is('Along the path: barriers')) .numbers > .table .copy").click()
    page.wait_for_selector("#said.on:has-text('Copied 2 rows')")
    copied = page.evaluate("navigator.clipboard.readText()").replace("\r\n", "\n")
    head, *rows = [line.split("\t") for line in copied.split("\n")]
    assert head[:2] == ["alignment", "distance"]
    for row, curve in zip(rows, documents["barrier"]["curves"], strict=True):
        assert row[0] == curve["name"]
        assert float(row[head.index("distance")]) == curve["distance"]
        assert float(row[head.index("barrier")]) == curve["barrier"]
    assert seen.said == []
    page.context.close()
