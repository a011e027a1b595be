"""The screenshots of a page that `symfuse demo` or `symfuse report` wrote: python docs/screenshots.py symfuse-demo.html

Playwright drives the system's Chromium; one picture at the width of a phone, in the dark, and one at that of a desk.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent / "images"
LIMIT = 400_000  # bytes of a picture
SHOTS = {390: (1500, "dark", 2), 1280: (1500, "light", 1)}  # by width: height, colours, pixels a point


def shoot(browser: Any, page_file: Path, width: int, section: str) -> Path:
    """The page from its top, or from a section's heading on."""
    height, colours, scale = SHOTS[width]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=colours, device_scale_factor=scale
    )
    page = context.new_page()
    page.goto(page_file.resolve().as_uri())
    page.wait_for_selector("html.drawn")
    page.wait_for_timeout(500)
    if section:
        page.locator(f"h2:text-is('{section}')").evaluate("one => window.scrollTo(0, one.offsetTop - 16)")
        page.wait_for_timeout(500)
    target = IMAGES / f"report-{width}.png"
    page.screenshot(path=target)
    context.close()
    if target.stat().st_size > LIMIT:
        raise SystemExit(f"{target} has {target.stat().st_size} bytes, more than {LIMIT}: make it lower")
    return target


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--section", default="Along the path: barriers", help="From which heading on; '': the top.")
    options = parser.parse_args()
    browser_file = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_file is None:
        raise SystemExit("there is no Chromium on this system")
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_file, args=["--no-sandbox"])
        for width in SHOTS:
            print(shoot(browser, options.page, width, options.section))
        browser.close()


if __name__ == "__main__":
    main()
