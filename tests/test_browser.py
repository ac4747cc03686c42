"""The HTML report in a real browser: no console error, filters and sorting work, it looks right."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import CUDA, fake_run, row
from launches import write_launch
from PIL import Image

from mokbench import report
from mokbench.results import RunFolder

ROOT = Path(__file__).parents[1]
BASELINES = ROOT / "results" / "h200" / "baselines"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium of the machine; playwright's own download is not asked for."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no Chromium here (looked for {', '.join(BROWSERS)})")
    with sync_api.sync_playwright() as playwright:
        # Containers run as root, for whom Chromium has no sandbox; the page is our own.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report.html_report([RunFolder.open(BASELINES)]), encoding="utf-8")
    return path


class Opened:
    """A page, and everything it complained about or asked the network for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.problems: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(path.as_uri())

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.problems.append(f"asked for {request.url}")

    def rows(self, grid: str) -> list[str]:
        return self.page.locator(f"#{grid} tbody tr:visible").all_inner_texts()

    def figures(self, grid: str, heading: str) -> list[float]:
        """First number of each visible row in the column under ``heading``."""
        headings = self.page.locator(f"#{grid} thead th").all_inner_texts()
        at = [text.split(" (")[0].strip() for text in headings].index(heading)
        return [float(text.split("\t")[at].split(" ")[0]) for text in self.rows(grid)]


def test_a_click_on_a_filter_and_on_a_heading(
    browser: Any, baselines: Path, tmp_path: Path
) -> None:
    opened = Opened(browser, baselines, viewport={"width": 1280, "height": 900})
    assert len(opened.rows("cells")) == 62
    grid = opened.page.locator("#cells")
    grid.get_by_label("system").select_option("alltoall")
    shown = opened.rows("cells")
    assert len(shown) == 6
    assert all("alltoall" in text for text in shown)
    assert grid.locator("output").inner_text() == "6 of 62 rows"
    grid.get_by_role("button", name="step us (95 % CI)").click()
    steps = opened.figures("cells", "step us")
    assert steps == sorted(steps)
    assert len(set(steps)) == 5  # two rows show the same
    grid.get_by_role("button", name="step us (95 % CI)").click()
    assert opened.figures("cells", "step us") == steps[::-1]
    aligned = "cell => getComputedStyle(cell).textAlign"
    first = grid.locator("tbody tr:visible").first.locator("td")
    assert [first.nth(i).evaluate(aligned) for i in (0, 2)] == ["left", "right"]
    grid.get_by_label("search").fill("qwen3 skewed")
    assert len(opened.rows("cells")) == 1
    screenshot = tmp_path / "report.png"
    opened.page.screenshot(path=screenshot)
    pixels = np.asarray(Image.open(screenshot).convert("L"))
    assert pixels.shape == (900, 1280)
    assert pixels.std() > 10  # something is drawn
    assert opened.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_in_light_and_dark(browser: Any, baselines: Path, scheme: str) -> None:
    opened = Opened(browser, baselines, viewport={"width": 375, "height": 800}, color_scheme=scheme)
    width = opened.page.evaluate("document.documentElement.scrollWidth")
    assert width == 375  # tables scroll inside themselves
    ink, paper = opened.page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert contrast(ink, paper) > 7
    # What matplotlib draws in black must follow the page.
    text = opened.page.locator("#step_time svg text").first
    assert contrast(text.evaluate("node => getComputedStyle(node).fill"), paper) > 7
    assert opened.problems == []


WIDTHS = """() => [...document.querySelectorAll(".chart")].map((chart) => ({
  shown: chart.querySelector("svg").getBoundingClientRect().width,
  own: (chart.querySelector("svg").viewBox.baseVal.width * 4) / 3,
  place: chart.clientWidth,
  scrolled: chart.scrollWidth > chart.clientWidth,
}))"""


@pytest.mark.parametrize("width", [390, 1280])
def test_charts_fit_the_width_and_grow_on_a_tap(browser: Any, tmp_path: Path, width: int) -> None:
    run = fake_run(tmp_path / "run", tokens=(1, 16, 128), regimes=("isolated",), keep_samples=True)
    path = tmp_path / "wide.html"
    path.write_text(report.html_report([run]), encoding="utf-8")
    opened = Opened(browser, path, viewport={"width": width, "height": 800})
    found = opened.page.evaluate(WIDTHS)
    assert max(one["own"] for one in found) > 390
    assert not any(one["scrolled"] for one in found)
    for one in found:
        assert one["shown"] == pytest.approx(min(one["own"], one["place"]), abs=1)
    offered = opened.page.locator(".enlarge:visible")
    assert offered.count() == sum(one["shown"] + 1 < one["own"] for one in found)
    if width == 390:
        widest = max(range(len(found)), key=lambda i: found[i]["own"])
        button = opened.page.locator(".chart").nth(widest).locator("xpath=following-sibling::*[1]")
        button.click()
        (grown,) = opened.page.evaluate(WIDTHS)[widest : widest + 1]
        assert grown["shown"] == pytest.approx(grown["own"], abs=1)
        assert grown["scrolled"]
        assert opened.page.evaluate("document.documentElement.scrollWidth") == width
        button.click()
        assert opened.page.evaluate(WIDTHS) == found
    assert opened.problems == []


def test_on_paper_nothing_is_cut_off(browser: Any, baselines: Path) -> None:
    opened = Opened(browser, baselines, viewport={"width": 1000, "height": 800})
    opened.page.emulate_media(media="print")
    assert opened.page.locator("#cells .filters").is_hidden()
    clipped = opened.page.evaluate(
        "[...document.querySelectorAll('.scroll')]"
        ".filter((e) => getComputedStyle(e).overflowY !== 'visible').length"
    )
    assert clipped == 0
    assert opened.problems == []


def test_many_rows_stay_usable(browser: Any, tmp_path: Path) -> None:
    records = [
        row("mok", 100.0 + i, routing=f"r{i % 10}", tokens_per_rank=1 + i // 10, **CUDA)
        for i in range(1000)
    ]
    path = tmp_path / "many.html"
    path.write_text(
        report.html_report([write_launch(tmp_path / "run", records, 0)]), encoding="utf-8"
    )
    opened = Opened(browser, path)
    opened.page.locator("#cells").get_by_label("routing").select_option("r7")
    assert len(opened.rows("cells")) == 100
    assert opened.problems == []


def test_the_twins_page_has_no_error_either(browser: Any, tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", tokens=(16,), regimes=("isolated",), keep_samples=True)
    path = tmp_path / "twin.html"
    path.write_text(report.html_report([run]), encoding="utf-8")
    opened = Opened(browser, path)
    assert "no performance verdict" in opened.page.locator("#verdict").inner_text()
    assert opened.problems == []


def contrast(a: str, b: str) -> float:
    """WCAG contrast ratio of two CSS rgb() colours."""

    def luminance(text: str) -> float:
        parts = [int(part) / 255 for part in text[text.index("(") + 1 : -1].split(",")[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)
