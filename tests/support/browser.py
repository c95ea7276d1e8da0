"""A real browser, without a display: Debian's chromium and chromium-driver, driven by selenium.

apt-get install --yes --no-install-recommends chromium chromium-driver
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NEEDED = ("chromium", "chromedriver")


def lacking() -> str | None:
    """Returns what is not there, and how to get it; None if all is."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"no {' and no '.join(missing)}: apt-get install chromium chromium-driver" if missing else None


@contextmanager
def browser() -> Iterator[Any]:
    """Starts a browser, and ends it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    # Containers run tests as root, and have a small /dev/shm; the pages are those of the tests.
    for each in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(each)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def look(driver: Any, page: Path, width: int = 1280, dark: bool = False) -> None:
    """Opens a page from disk, as wide as a desktop's or a phone's, with the light or the dark scheme of the system."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.get(page.as_uri())


def complaints(driver: Any) -> list[str]:
    """Returns what the console has that is no information."""
    return [each["message"] for each in driver.get_log("browser") if each["level"] not in ("INFO", "DEBUG")]
