"""Checks the built site: python -m scripts.docs.check SITE

Every link within the site must lead to a page and a section, and nothing may be loaded from
elsewhere. If Chromium is installed, it opens all pages: they must load and show their pictures, the
search must find pages, and the console must have no error. Links to other sites are not followed.
"""

from __future__ import annotations

import contextlib
import functools
import html
import http.server
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SECONDS = 120  # time limit for one call of the browser
# Words that are searched for, and the page that the search must find.
SEARCHES = {
    "block_momentum": "reference/rules.html",
    "TFPARA_RESTART_EXIT_CODE": "reference/environment.html",
    "sync period": "concepts/",
}
_OPENS_ALL = """<!doctype html><title>all pages</title><iframe width=1280 height=900></iframe>
<script>
(async () => {
  const frame = document.querySelector("iframe"), found = [];
  for (const page of PAGES) {
    await new Promise(done => { frame.onload = done; frame.src = page; });
    const inner = frame.contentDocument;
    if (!inner.querySelector("h1")) found.push(page + " has no heading");
    for (const image of inner.images) {
      await image.decode().catch(() => {});
      if (!image.naturalWidth) found.push(page + " does not show " + image.getAttribute("src"));
    }
  }
  await fetch("/", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


def pages(site: Path) -> list[str]:
    """Returns the pages of a built site, without 404.html and copies of source files."""
    found = (path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html")))
    return [page for page in found if page != "404.html" and not page.startswith("source/")]


def wrong_links(site: Path) -> Iterator[str]:
    """Yields wrong links, and files that would be loaded from elsewhere."""
    texts = {page: (site / page).read_text() for page in pages(site)}
    named = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    for page, text in texts.items():
        for tag, target in re.findall(r'<(\w+)\b[^>]*?\s(?:href|src)="?([^"\s>]+)', text):
            parts = urlsplit(html.unescape(target))
            if parts.scheme or parts.netloc:
                if tag != "a":
                    yield f"{page} loads {target}"
                continue
            there = (site / page).parent / unquote(parts.path) if parts.path else site / page
            if not there.exists():
                yield f"{page} links to {target}, which there is not"
                continue
            other = there.resolve().relative_to(site.resolve()).as_posix()
            anchor = unquote(parts.fragment)
            if anchor and other in named and anchor not in named[other] | {"__toc", "__search"}:
                yield f"{page} links to {target}, and {other} has no such section"


def browser() -> str | None:
    """Returns the path of a browser, if there is one."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def wrong_in_browser(site: Path, program: str) -> Iterator[str]:
    """Yields faults that a browser finds: in pages over HTTP, and in the search over file://."""
    reports: queue.Queue[list[str]] = queue.Queue()
    handler = functools.partial(_Pages, reports, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/?all-pages"
    try:
        with browsing(program, address) as console:
            yield from reports.get(timeout=_SECONDS)
    except queue.Empty:
        yield f"the browser has not opened all pages within {_SECONDS} s"
    finally:
        server.shutdown()
        server.server_close()
    yield from console
    for words, page in SEARCHES.items():
        address = f"{(site / 'index.html').resolve().as_uri()}?q={words.replace(' ', '+')}"
        with browsing(program, address, "--virtual-time-budget=8000", "--dump-dom") as console:
            pass
        found = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', console.shown)
        if not any(f"/{page}" in link for link in found):
            yield f"the search for {words!r} does not find {page}, but {found[:5] or 'nothing'}"
        yield from console


class _Pages(http.server.SimpleHTTPRequestHandler):
    """Serves the files of a site, and a page that opens all of them and reports faults."""

    def __init__(self, reports: queue.Queue[list[str]], *arguments: Any, **options: Any) -> None:
        self._reports = reports
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        if self.path != "/?all-pages":
            return super().do_GET()
        content = _OPENS_ALL.replace("PAGES", json.dumps(pages(Path(self.directory)))).encode()
        self._answer(content)

    def do_POST(self) -> None:
        self._reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(b"")

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class _Console(list[str]):
    """The errors on a browser's console; `shown` is the page that the browser printed."""

    shown = ""


@contextlib.contextmanager
def browsing(program: str, address: str, *flags: str) -> Iterator[_Console]:
    """Opens a page. With `flags` the browser ends by itself, else at the end of the context."""
    console = _Console()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--enable-logging=stderr",
            *flags, address,
        ]  # fmt: skip
        shown, said = Path(profile) / "shown", Path(profile) / "said"
        with shown.open("w") as out, said.open("w") as errors:
            process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
        try:
            yield console
            if flags:
                process.wait(timeout=_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        console.shown = shown.read_text()
        lines = [line for line in said.read_text().splitlines() if "CONSOLE" in line]
    console += [f"console: {line.split('CONSOLE', 1)[1]}" for line in lines]


def main(arguments: list[str]) -> int:
    """Prints the faults of a site, and what was not checked."""
    site = Path(arguments[0])
    wrong = list(wrong_links(site))
    program = browser()
    if program:
        wrong += wrong_in_browser(site, program)
    else:
        print(f"Left out: all pages in a browser, since there is none of {', '.join(_BROWSERS)}.")
    print("Left out: links to other sites, which are not followed.")
    print(*wrong, f"{len(pages(site))} pages, {len(wrong)} faults", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
