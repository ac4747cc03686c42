"""Screenshots of a run's HTML report in headless Chromium: the pictures in docs/.

    python scripts/screenshot.py results/h200/baselines docs/report.png

Needs playwright (pip install '.[test]') and the machine's own chromium.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from mokbench import report
from mokbench.results import RunFolder

SIZE = {"width": 1280, "height": 1100}


def main() -> None:
    """Write the first screen of the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "report.html"
        page_file.write_text(report.html_report([RunFolder.open(told.run)]), encoding="utf-8")
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=SIZE, color_scheme="dark" if told.dark else "light")
        page.goto(page_file.as_uri())
        page.screenshot(path=told.picture)
        browser.close()


if __name__ == "__main__":
    main()
