"""A report in Chromium: values below the pointer, arms that a click hides, no request.

Usage: report_client.py REPORT.html. Prints `all well`, or `no Chromium` where there is none."""

import os
import pathlib
import shutil
import sys

from playwright.sync_api import sync_playwright

names = ["chromium", "chromium-browser", "google-chrome"]
browser = os.environ.get("DREAMC_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
if browser is None:
    print("no Chromium")
    sys.exit(0)

page_file = pathlib.Path(sys.argv[1]).resolve()
with sync_playwright() as playwright:
    chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
    page = chromium.new_page()
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(page_file.as_uri())

    # A curve with several arms.
    plot = page.locator("svg.plot:has(g.key.live)").first
    plot.scroll_into_view_if_needed()
    keys = plot.locator("g.key.live")
    arms = keys.count()
    assert arms >= 2, arms
    values = plot.locator("xpath=following-sibling::div[contains(@class, 'values')]")
    assert not values.is_visible()

    # The pointer shows a line of each arm; the nearest point of the arm is what the line says.
    box = plot.bounding_box()
    pointer = (box["x"] + 0.8 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.move(*pointer)
    assert values.is_visible()
    lines = values.locator("div").all_inner_texts()
    assert len(lines) == arms, (lines, arms)
    first = plot.locator("g.series[data-points]").first
    name, points = first.get_attribute("data-name"), first.evaluate("g => JSON.parse(g.dataset.points)")
    at = plot.evaluate("(p, x) => new DOMPoint(x, 0).matrixTransform(p.getScreenCTM().inverse()).x", pointer[0])
    nearest = min(points, key=lambda point: abs(point[0] - at))
    assert f"{name}: {nearest[2]} at {nearest[1]}" in lines, (nearest, lines)

    # A click on a name hides the arm in the curve and at the pointer; another click brings it back.
    key = keys.first
    number = key.get_attribute("data-series")
    curve = plot.locator(f'g.series[data-series="{number}"]').first
    assert curve.locator("path, circle, line").first.is_visible()
    key.click()
    assert key.get_attribute("aria-pressed") == "false"
    assert not curve.locator("path, circle, line").first.is_visible()
    page.mouse.move(*pointer)
    assert len(values.locator("div").all_inner_texts()) == arms - 1
    # The keyboard does what a click does.
    key.focus()
    page.keyboard.press("Enter")
    assert key.get_attribute("aria-pressed") == "true"
    assert curve.locator("path, circle, line").first.is_visible()
    page.mouse.move(1, 1)
    assert not values.is_visible()

    assert requests == [page_file.as_uri()], requests
    assert not errors, errors

    # Without scripts the page has the same curves and tables, and nothing at the pointer.
    still = chromium.new_context(java_script_enabled=False).new_page()
    still.goto(page_file.as_uri())
    assert still.locator("svg.plot").count() == page.locator("svg.plot").count()
    assert still.locator("table").count() == page.locator("table").count()
    chromium.close()
print("all well")
