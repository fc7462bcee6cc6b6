"""The site of docs/: its links and anchors; in a real browser its search, what is cut, and what the console says."""

import functools
import html.parser
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
BASE = urlsplit(URLS["Documentation"]).path
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CUT = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = (node) => { for (let one = node; one; one = one.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(one).overflowX)) return true; return false; };
  const cut = [...document.querySelectorAll(".md-content *, .md-header *, .md-footer *")].filter((node) => {
    const box = node.getBoundingClientRect();
    return box.width && box.height && getComputedStyle(node).visibility != "hidden" && !node.closest("[role=dialog]")
      && (box.right > width + 1 || box.left < -1) && !scrolls(node); });
  return [document.scrollingElement.scrollWidth - width, cut.slice(0, 3).map((node) => node.outerHTML.slice(0, 100))];
}"""
"""By how many pixels a page can be scrolled to the side, and what leaves it and lies in no box that scrolls."""

missing = [name for name in ("mkdocs", "material", "mkdocstrings", "playwright") if not importlib.util.find_spec(name)]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}: pip install -e '.[docs]'")
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
in_browser = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM}: apt-get install chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built with warnings as errors: `--quiet` would let them pass."""
    folder = tmp_path_factory.mktemp("site") / BASE.strip("/")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


class Page(html.parser.HTMLParser):
    """The links of a page, and the anchors in it."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        self.links += [found[key] for key in ("href", "src") if found.get(key)]


@pytest.fixture(scope="module")
def pages(site):
    """Every page by its address."""
    files = sorted(site.rglob("*.html"))
    names = [BASE + file.relative_to(site).as_posix().removesuffix("index.html") for file in files]
    return {name: Page(file.read_text(encoding="utf-8")) for name, file in zip(names, files, strict=True)}


def test_every_link_and_anchor_leads_somewhere(site, pages):
    checked, wrong = 0, []
    for name, page in pages.items():
        for link in page.links:
            address = urljoin(urljoin(URLS["Documentation"], name), link)
            checked += 1
            if not leads_somewhere(address, site, pages):
                wrong.append((name, link))
    assert not wrong
    assert len(pages) > 40 and checked > 3000


def leads_somewhere(address, site, pages):
    """Whether an address is one of the site's, of a file of the repository, or of another host."""
    parts = urlsplit(address)
    if address.startswith(URLS["Repository"] + "/"):
        _, kind, _, path = address.removeprefix(URLS["Repository"]).split("/", 3)
        return (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file()
    if not address.startswith(URLS["Documentation"]):
        is_page = not parts.path.endswith(".md") or parts.hostname == "github.com"  # which shows Markdown as a page
        return parts.scheme == "https" and bool(parts.hostname) and is_page
    if parts.path in pages:
        return unquote(parts.fragment) in pages[parts.path].anchors
    return (site / parts.path.removeprefix(BASE)).is_file()


def test_every_error_and_finding_has_its_stable_address(pages):
    from torchport import errors
    from torchport.porting.scan import RULES

    assert {id.lower() for id in errors.KINDS} <= pages[f"{BASE}errors/"].anchors
    assert {id.lower() for id in RULES} <= pages[f"{BASE}scan/"].anchors


def test_markdown_lies_beside_every_page_and_llms_txt_names_it(site, pages):
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    for name in pages.keys() - {f"{BASE}404.html"}:
        file = site / name.removeprefix(BASE) / "index.html.md"
        text = file.read_text(encoding="utf-8")
        assert text.startswith("# "), file
        assert urljoin(URLS["Documentation"], file.relative_to(site).as_posix()) in listed, file
        for link in re.findall(r"\]\((https://[^)]*)\)", FENCE.sub("", text)):
            assert leads_somewhere(link.partition("#")[0], site, pages), (file, link)


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served, on this machine."""
    handler = functools.partial(Quiet, directory=site.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and logs no request."""

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def browser():
    """The installed Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_and_the_console_is_silent(scheme, browser, address, pages):
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1400, "height": 900})
    tab, said, cut = context.new_page(), [], []
    tab.on("console", lambda message: said.append((tab.url, message.text)))
    tab.on("pageerror", lambda error: said.append((tab.url, str(error))))
    tab.on("requestfailed", lambda request: said.append((tab.url, request.url)))
    tab.on("request", lambda request: request.url.startswith(address) or said.append((tab.url, request.url)))
    for name in pages:
        for width in (1400, 400):
            tab.set_viewport_size({"width": width, "height": 900})
            if width == 1400:
                tab.goto(address + name, wait_until="load")
            beyond, nodes = tab.evaluate(CUT)
            if beyond > 0 or nodes:
                cut.append((name, width, beyond, nodes))
        assert tab.evaluate("document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[scheme]
    context.close()
    assert not cut
    assert not said


@in_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_search_finds_an_error_by_its_id(width, browser, address):
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.goto(f"{address}{BASE}", wait_until="load")
    tab.keyboard.press("/")
    tab.keyboard.type("TP203")
    found = tab.locator("a.md-search-result__link[href$='#tp203']")
    found.wait_for(timeout=20_000)
    assert found.inner_text().startswith("TP203 ")
    found.click()
    tab.wait_for_url("**/errors/**#tp203")
    tab.close()


@in_browser
def test_a_page_that_is_cut_is_noticed(browser):
    tab = browser.new_page(viewport={"width": 400, "height": 900})
    wide = "<div style='width: 600px'>wide</div>"
    tab.set_content(f"<div class='md-content'>{wide}</div>")
    assert tab.evaluate(CUT)[0] > 0
    tab.set_content(f"<div class='md-content' style='overflow: hidden'>{wide}</div>")
    assert tab.evaluate(CUT)[1] == [wide.replace("'", '"')]
    tab.set_content(f"<div class='md-content' style='overflow: auto'>{wide}</div>")
    assert tab.evaluate(CUT) == [0, []]
    tab.close()
