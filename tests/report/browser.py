"""A page in a real headless Chromium, and axe on it: no driver is needed, the page tells its own story in its text."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
AXE = REPOSITORY / ".browser" / "node_modules" / "axe-core" / "axe.min.js"

_LISTEN = """<script>
window.told = [];
for (const kind of ["error", "warn"]) {
  const before = console[kind];
  console[kind] = (...words) => { window.told.push(kind + ": " + words.join(" ")); before.apply(console, words); };
}
addEventListener("error", (event) => window.told.push("error: " + event.message));
addEventListener("unhandledrejection", (event) => window.told.push("rejection: " + event.reason));
addEventListener("securitypolicyviolation", (event) => window.told.push("blocked: " + event.blockedURI));
</script>"""

_TELL = """<script>
(async () => {
  await new Promise((done) => setTimeout(done, 300));
  const found = {
    told: window.told,
    charts: [...document.querySelectorAll(".chart")].map((chart) => {
      const box = chart.getBoundingClientRect();
      return { marks: chart.querySelectorAll("path.js-line, .point path, .points path, .barlayer path").length,
               words: chart.querySelectorAll("text").length, width: box.width, height: box.height };
    }),
    wide: document.documentElement.scrollWidth, window: window.innerWidth,
    paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    chartInk: getComputedStyle(document.querySelector(".chart text") || document.body).fill,
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
    broken: [], checked: 0,
  };
  if (window.axe) {
    const result = await axe.run(document);
    const words = (rule) => rule.id + ": " + rule.nodes.map((node) => node.html.slice(0, 120)).join(" | ");
    found.broken = result.violations.map(words);
    found.checked = result.passes.length;
  }
  if (parent !== window) return parent.postMessage(JSON.stringify(found), "*");
  const pre = document.createElement("pre");
  pre.id = "found";
  pre.textContent = JSON.stringify(found);
  document.body.append(pre);
})();
</script>"""

_PHONE = """<!doctype html><meta name="color-scheme" content="light dark"><script>
addEventListener("message", (event) => {
  const pre = document.createElement("pre");
  pre.id = "found";
  pre.textContent = event.data;
  document.body.append(pre);
});
</script><body><iframe src="%s" style="width:%dpx;height:800px;border:0"></iframe>"""
"""A browser's window has a least width that a phone's screen has not; a frame has none."""


def chromium() -> str | None:
    """The browser's path; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def missing() -> str | None:
    """Why the browser tests cannot run here; None when they can."""
    if chromium() is None:
        return "no Chromium here (make browser installs it where apt-get may)"
    return None if AXE.exists() else "no axe-core here (make browser gets it from npm)"


def look(page: Path, folder: Path, width: int = 1200, dark: bool = False) -> dict[str, Any]:
    """Open `page` in the browser and return what it found out about itself; a copy with our scripts in it lies in `folder`."""
    text = page.read_text()
    head, _, rest = text.partition("<meta charset")
    instrumented = f"{head}{_LISTEN}<meta charset{rest}".replace("</body>", f"<script>{AXE.read_text()}</script>{_TELL}</body>")
    copy = folder / f"look-{width}-{dark}.html"
    copy.write_text(instrumented)
    if width < 500:
        frame = folder / f"frame-{width}-{dark}.html"
        frame.write_text(_PHONE % (copy.name, width))
        copy = frame
    browser = chromium()
    assert browser is not None
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},900",
        "--virtual-time-budget=20000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--dump-dom",
        copy.as_uri(),
    ]
    environment = {**os.environ, "HOME": str(folder), "DBUS_SESSION_BUS_ADDRESS": "disabled:"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, f"the page did not get to its end:\n{done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(unescape(match[1]))
    return found
