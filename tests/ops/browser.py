"""A real Chromium that looks at a page."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

WAIT_S = 60.0
SCREENSHOTS = os.environ.get("SCREENSHOTS")
"""A folder to leave pictures in, such as docs/images; None: nowhere."""
PICTURE_HEIGHT_MAX = 4800

UP_TO_DATE = "page up to date"
RENAME = """
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode())
        for (const [old, shown] of %s)
            walk.currentNode.data = walk.currentNode.data.replaceAll(old, shown);
"""


class Browser:
    """One window."""

    def __init__(self) -> None:
        options = Options()
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        path = shutil.which("chromedriver")
        assert path is not None, "chromedriver is missing: apt-get install chromium-driver"
        self.driver = webdriver.Chrome(options=options, service=Service(path))

    def close(self) -> None:
        """Close it."""
        self.driver.quit()

    def resize(self, width: int, height: int = 1000) -> None:
        """Make the window so wide, in CSS pixels; narrower than Chromium's own can be, too."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Prefer light or dark."""
        features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", features)

    def open(self, url: str) -> None:
        """Open a page, and wait until it is kept up to date."""
        self.driver.get(url)
        self.wait_for(lambda: self.text("connection") == UP_TO_DATE)

    def text(self, element: str) -> str:
        """Return what an element shows, by its id."""
        content = self.script(f"return document.getElementById('{element}')?.textContent.trim()")
        return str(content)

    def rows(self, section: str) -> list[list[str]]:
        """Return the cells of a section's tables, without their heads."""
        texts = self.script(  # at one look: the page may change between two
            f"return [...document.querySelectorAll('#{section} tbody tr')].map("
            "(row) => [...row.cells].map((cell) => cell.textContent.trim()))"
        )
        assert isinstance(texts, list)
        return texts

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until the page shows something."""
        WebDriverWait(self.driver, WAIT_S, poll_frequency=0.2).until(
            lambda _: is_so(), "the page does not come to show it"
        )

    def type(self, element: str, text: str) -> None:
        """Write into a field, by its id."""
        field = self.driver.find_element("id", element)
        field.clear()
        field.send_keys(text)

    def click(self, selector: str, *, confirms: bool = True) -> None:
        """Press a button that asks once more, and answer."""
        self.driver.find_element("css selector", selector).click()
        question = self.driver.switch_to.alert
        (question.accept if confirms else question.dismiss)()

    def script(self, text: str) -> object:
        """Return what a script on the page says."""
        result: object = self.driver.execute_script(text)
        return result

    def complaints(self) -> list[str]:
        """Return the errors in the browser's console since the last call."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]

    def picture(self, name: str, shown: Mapping[str, str], width: int = 1100) -> None:
        """Leave a picture of the whole page, if pictures are wanted.

        Args:
            name: of the file.
            shown: what stands in the picture, in the place of folders and names of a test.
            width: in CSS pixels.
        """
        if SCREENSHOTS is None:
            return
        self.resize(width)
        height = self.script("return document.documentElement.scrollHeight")
        assert isinstance(height, int)
        self.resize(width, min(height + 40, PICTURE_HEIGHT_MAX))
        self.wait_for(lambda: self.text("connection") == UP_TO_DATE)
        self.script(RENAME % json.dumps(list(shown.items())))
        self.driver.save_screenshot(str(Path(SCREENSHOTS) / f"{name}.png"))
        self.resize(1100)
