"""Debian's Chromium, driven by Selenium, and axe-core: installed when they are missing."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
AXE = "axe-core@4.10.3"
AXE_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--force-color-profile=srgb", "--lang=en",
)  # fmt: skip
WIDE, NARROW = (1280, 900), (390, 844)


def install() -> None:
    """Install Debian's packages `chromium` and `chromium-driver` where they are missing; needs root."""
    if Path(CHROMIUM).exists() and Path(DRIVER).exists():
        return
    environment = {"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium", "chromium-driver"],
    ):
        subprocess.run(command, check=True, timeout=900, env=environment, stdout=subprocess.DEVNULL)


def axe() -> str:
    """The script of axe-core, fetched by npm once and kept in the temporary folder."""
    kept = (
        Path(tempfile.gettempdir()) / f"durable-jobs-{hashlib.sha256(AXE.encode()).hexdigest()[:12]}-axe.js"
    )
    if not kept.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise RuntimeError("axe-core comes by npm: install Node.js.")
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [npm, "pack", "--silent", AXE], cwd=folder, check=True, timeout=300, stdout=subprocess.DEVNULL
            )
            [archive] = Path(folder).glob("*.tgz")
            with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as files:
                member = files.extractfile("package/axe.min.js")
                assert member is not None
                script = member.read()
        whole = kept.with_suffix(".part")
        whole.write_bytes(script)
        whole.replace(kept)
    return kept.read_text()


class Browser:
    """One window of a browser with a profile of its own."""

    def __init__(self, site: str, folder: Path, *, script: bool = True) -> None:
        install()
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in (*ARGUMENTS, f"--user-data-dir={folder}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        if not script:
            options.add_experimental_option(
                "prefs", {"profile.managed_default_content_settings.javascript": 2}
            )
        self.site = site
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.set_page_load_timeout(30)
        self.size(WIDE)

    def close(self) -> None:
        self.driver.quit()

    def size(self, size: tuple[int, int]) -> None:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """`light` or `dark`, as the user's system asks for."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def cookie(self, name: str, value: str) -> None:
        self.driver.execute_cdp_cmd("Network.setCookie", {"name": name, "value": value, "url": self.site})

    def open(self, path: str) -> None:
        self.driver.get(f"{self.site}{path}")

    @property
    def text(self) -> str:
        said: list[str] = []
        self.wait(lambda: said.append(self.driver.find_element(By.TAG_NAME, "body").text) or True)
        return " ".join(said[-1].split())

    def wait_for(self, text: str, seconds: float = 20) -> None:
        self.wait(lambda: text in self.text, f"no {text!r} in {self.text[:3000]}", seconds)

    def wait(self, condition: Any, problem: str = "", seconds: float = 20) -> None:
        def holds(driver: Any) -> bool:
            try:
                return bool(condition())
            except WebDriverException as error:
                if is_exchanged(error):
                    return False
                raise

        WebDriverWait(self.driver, seconds, poll_frequency=0.1).until(holds, problem)

    def click(self, text: str) -> None:
        """Click the link or button that says so, and wait for the page that it leads to."""
        path = f"//a[normalize-space()={_quoted(text)}] | //button[normalize-space()={_quoted(text)}]"
        page = self.driver.find_element(By.TAG_NAME, "html")

        def click() -> bool:
            # A part of the page may be exchanged between the look and the click.
            found = [one for one in self.driver.find_elements(By.XPATH, path) if one.is_displayed()]
            if found:
                found[0].click()
            return bool(found)

        self.wait(click, f"nothing to click says {text!r}", 5)

        def is_gone(driver: Any) -> bool:
            try:
                page.is_enabled()
            except WebDriverException as error:
                if is_exchanged(error):
                    return True
                raise
            return False

        WebDriverWait(self.driver, 20, poll_frequency=0.05).until(is_gone, f"{text!r} leads nowhere")

    def fill(self, name: str, value: str) -> None:
        field = self.driver.find_element(By.NAME, name)
        field.clear()
        field.send_keys(value)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def complaints(self) -> list[str]:
        """What the browser has complained about since the last time: scripts, policy, missing files."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if "favicon" not in entry["message"] and "autocomplete" not in entry["message"]
        ]

    def violations(self) -> list[str]:
        """What axe-core finds wrong with the page."""
        self.driver.execute_script(axe())
        found = self.driver.execute_async_script(
            "const done = arguments[1];"
            "axe.run(document, {runOnly: {type: 'tag', values: arguments[0]}, resultTypes: ['violations']})"
            ".then(found => done(found.violations.map(one => one.id + ': ' + one.help + ' | '"
            " + one.nodes.slice(0, 3).map(node => node.html.slice(0, 160) + ' ' + (node.failureSummary || '').slice(0, 200)).join(' | '))))"
            ".catch(error => done(['axe failed: ' + error]));",
            AXE_RULES,
        )
        return list(found)

    def height(self) -> int:
        return int(self.driver.execute_script("return document.documentElement.scrollHeight"))

    def is_too_wide(self) -> bool:
        """Whether the page has to be moved sideways."""
        return bool(
            self.driver.execute_script(
                "return document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"
            )
        )


def is_exchanged(error: WebDriverException) -> bool:
    """Whether a look met a page that is being exchanged just now: Chromium has several words for it."""
    said = str(error).lower()
    return any(
        words in said for words in ("stale element", "no such element", "does not belong to the document")
    )


def _quoted(text: str) -> str:
    return f'"{text}"' if "'" in text else f"'{text}'"
