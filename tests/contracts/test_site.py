"""The documentation as a site: mkdocs finds no broken link, and a browser finds pages by their words, without a server."""

import subprocess
from pathlib import Path

import pytest
from common import BROWSER_ARGUMENTS, browser_executable, python_with
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]


@pytest.mark.campaign
def test_the_site_is_built_without_a_warning_and_searched_without_a_server(tmp_path):
    command = [
        python_with("mkdocs==1.6.1"),
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-q",
        "-d",
        tmp_path / "site",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").glob("*.md")}
    assert all((tmp_path / "site" / page).with_suffix(".html").exists() for page in pages)
    asked = []
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=browser_executable(), args=BROWSER_ARGUMENTS)
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "site" / "index.html").as_uri())
        page.get_by_role("button", name="Search").or_(page.get_by_role("link", name="Search")).first.click()
        page.locator("#mkdocs-search-query").press_sequentially("heartbeat")
        found = page.locator("#mkdocs-search-results a")
        found.first.wait_for()
        found.first.click()
        page.wait_for_url("**/*.html#*")
        assert "heartbeat" in page.locator("body").inner_text().lower()
        browser.close()
    assert all(url.startswith("file:") for url in asked)
