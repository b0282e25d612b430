"""The site of the executed course: what it shows, what it hides, and what it refuses."""

import base64
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import nbformat
import pytest
from nbformat import v4
from sample_record import sample_record

from labkit import LabError, save_record
from labkit.notebooks import FOLDER
from labkit.report import _by_heading, _cut, build_site

LABKIT = Path(sys.executable).with_name("labkit")
STEMS = sorted(path.stem for path in FOLDER.glob("0*.ipynb"))
PAGES = ["index.html", *(f"{stem}{kind}.html" for stem in STEMS for kind in ("", ".slides"))]
SIZE_LIMIT_BYTES = 15e6
OFFICIAL = {
    "docs.jupyter.org", "docs.nvidia.com", "docs.python.org", "docs.pytorch.org",
    "developer.nvidia.com", "ipywidgets.readthedocs.io", "nvidia.github.io", "pytorch.org",
    "simpy.readthedocs.io", "ui.perfetto.dev", "www.kernel.org",
}  # fmt: skip
LOADING = {"src", "srcset", "poster", "data", "background", "xlink:href"}
# A picture of one pixel.
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


class Page(HTMLParser):
    """What a browser would fetch, where links lead, and what pictures say."""

    def __init__(self, path: Path):
        super().__init__()
        self.fetched, self.links, self.alternatives, self.ids = [], [], [], set()
        self.text, self.style = "", ""
        self._open = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        if tag == "a":
            self.links.append(found.get("href", ""))
        elif "href" in found:
            self.fetched.append(found["href"])
        self.fetched += [value for name, value in attributes if name in LOADING]
        if tag == "img":
            self.alternatives.append(found.get("alt"))
        if tag in ("style", "script"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data):
        if self._open:
            self.style += data
        else:
            self.text += data


def refusal(*args) -> str:
    """The one line that the site is refused with."""
    with pytest.raises(LabError) as error:
        build_site(*args)
    text = str(error.value)
    assert text.strip() and "\n" not in text
    return text


# Of the real course.


@pytest.fixture(scope="session")
def site(all_five, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    command = [LABKIT, "report", "--from", all_five[1], "--out", "a site"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert "a site/index.html" in result.stdout
    return folder / "a site"


@pytest.fixture(params=PAGES)
def page(site, request):
    return Page(site / request.param)


def test_the_site_is_whole(site):
    assert sorted(path.name for path in site.iterdir()) == sorted([*PAGES, "reveal.js"])
    files = [path for path in site.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < SIZE_LIMIT_BYTES
    assert [path for path in site.parent.iterdir() if path.name.startswith(".")] == []
    for path in [site, *site.rglob("*")]:
        assert path.stat().st_mode & 0o044 == 0o044, "a web server must be able to read it"


def test_nothing_comes_from_the_net(site, page):
    for target in page.fetched:
        if not target.startswith("data:image/"):
            assert urlparse(target).scheme == urlparse(target).netloc == "", target
            assert (site / target).is_file(), target
    for word in ("@import", "url(http", "import(", "import ", "fetch(", "XMLHttpRequest"):
        assert word not in page.style.replace("@import url(./", ""), word


def test_what_the_slides_load_loads_nothing_from_the_net(site):
    sheets = [path for path in (site / "reveal.js").rglob("*.css")]
    assert sheets
    for path in sheets:
        assert "http" not in path.read_text().partition("*/")[2], path
    assert (
        "MIT" in (site / "reveal.js" / "LICENSE").read_text()
        or "Permission" in (site / "reveal.js" / "LICENSE").read_text()
    )


def test_links_lead_somewhere(site, page):
    assert page.links
    for link in page.links:
        found = urlparse(link)
        if found.scheme:
            assert found.scheme == "https" and found.netloc in OFFICIAL, link
        elif found.path:
            assert (site / unquote(found.path)).is_file(), link
        else:
            assert unquote(found.fragment) in page.ids, link


def test_pictures_have_alternatives(page, site, request):
    assert page.alternatives or "slides" in request.node.name
    for text in page.alternatives:
        assert len(text) > 60 and not text.startswith("Output of "), text


@pytest.mark.parametrize("stem", STEMS)
def test_every_figure_is_on_the_page_and_in_the_deck(all_five, site, stem):
    notebook = nbformat.read(all_five[1] / f"{stem}.ipynb", as_version=4)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    count = sum("image/png" in out.get("data", {}) for out in outputs)
    for kind in ("", ".slides"):
        assert len(Page(site / f"{stem}{kind}.html").alternatives) == count > 0


def test_no_widget_and_no_path_of_this_machine(site, all_five, page):
    assert "widget-view" not in page.style + page.text
    for place in (str(all_five[1].parent), str(Path.home()), str(FOLDER.parent), "übung"):
        assert place not in page.text


def test_index_has_the_ladder_and_the_labs(site, all_five):
    page = Page(site / "index.html")
    record = json.loads((all_five[1] / "records" / f"{STEMS[-1]}.json").read_text())
    for row in record["strategies"]:
        assert row["name"] in page.text and f"{row['samples_per_s']:,.0f}" in page.text
    assert "EMULATED" in page.text and "EMULATED" in page.alternatives[0]
    assert page.links == [name for name in PAGES if name != "index.html"]


@pytest.mark.parametrize("stem", STEMS)
def test_pages_lead_to_one_another(site, stem):
    page, slides = (Page(site / f"{stem}{kind}.html") for kind in ("", ".slides"))
    assert {"index.html", f"{stem}.slides.html"} <= set(page.links)
    assert {"index.html", f"{stem}.html"} <= set(slides.links)
    if stem != STEMS[-1]:
        following = STEMS[STEMS.index(stem) + 1]
        assert f"{following}.html" in page.links
        assert f"{following}.slides.html" in slides.links


# Of small notebooks.


def lab(*cells, parameters=None):
    first = v4.new_markdown_cell("# A title\n\nText.\n\n```\n# no heading\n```\n\n## Part\n\nMore.")
    metadata = {"papermill": {"parameters": parameters}} if parameters else {}
    return v4.new_notebook(cells=[first, *cells], metadata=metadata)


def ran(source, *outputs, tags=()):
    metadata = {"tags": list(tags)}
    return v4.new_code_cell(source, execution_count=1, outputs=list(outputs), metadata=metadata)


@pytest.fixture
def folder(tmp_path):
    """What a run would have left, with next to nothing in the notebooks."""
    made = tmp_path / "build"
    save_record(sample_record(), made / "records" / f"{STEMS[-1]}.json")
    for stem in STEMS:
        put(made, stem, ran("print(1)", v4.new_output("stream", text="1\n")))
    return made


def put(folder, stem, *cells, **options):
    nbformat.write(lab(*cells, **options), folder / f"{stem}.ipynb")


def test_planted_paths_are_hidden(folder, tmp_path):
    given = tmp_path / "my photographs" / "of é"
    texts = [f"in {given}/a.png", "at /opt/se-cret/x.py:3", "<b>/srv/secret/y</b>"]
    picture = v4.new_output(
        "display_data",
        {"image/png": PNG, "text/plain": "/srv/secret/z"},
        metadata={"image/png": {"alt": "A figure of /srv/secret/alt.png"}},
    )
    outputs = [
        v4.new_output("stream", text=texts[0]),
        v4.new_output("execute_result", {"text/plain": texts[1]}),
        v4.new_output("execute_result", {"text/html": texts[2], "text/plain": texts[2]}),
        picture,
    ]
    code = f'results_dir = "{folder}"\nimages = "{given}"\nurl = "https://docs.python.org/3/"'
    cells = ran(code, *outputs, tags=["injected-parameters"]), ran("open('/dev/shm/typed')")
    put(folder, STEMS[0], *cells, parameters={"images": str(given), "results_dir": str(folder)})
    site = build_site(folder, tmp_path / "site").parent
    for name in (f"{STEMS[0]}.html", f"{STEMS[0]}.slides.html"):
        text = (site / name).read_text()
        for hidden in (str(tmp_path), "my photographs", "se-cret", "secret"):
            assert hidden not in text
        for kept in ("…/of é", "…/x.py:3", "<b>…/y</b>", "https://docs.python.org/3/", "/dev/shm/"):
            assert kept in text, kept
        assert PNG in text and Page(site / name).alternatives == ["A figure of …/alt.png"]


def test_a_picture_without_alternative_is_named_after_its_cell(folder, tmp_path):
    shown = v4.new_output("display_data", {"image/png": PNG})
    put(folder, STEMS[1], ran('plt.plot("<&>")\nplt.show()', shown))
    site = build_site(folder, tmp_path / "site").parent
    alternatives = Page(site / f"{STEMS[1]}.html").alternatives
    assert alternatives == ['Output of plt.plot("<&>")']


def test_widgets_are_left_out(folder, tmp_path):
    kind = "application/vnd.jupyter.widget-view+json"
    data = {kind: {"model_id": "0" * 32, "version_major": 2}, "text/plain": "a slider"}
    notebook = lab(ran("slider", v4.new_output("display_data", data)))
    state = {"state": {"0" * 32: {}}, "version_major": 2, "version_minor": 0}
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": state}
    nbformat.write(notebook, folder / f"{STEMS[0]}.ipynb")
    text = (build_site(folder, tmp_path / "site").parent / f"{STEMS[0]}.html").read_text()
    assert "vnd.jupyter.widget" not in text and "embed-amd" not in text and "a slider" in text


def test_slides_begin_at_headings():
    text = "# One\n\na\n```\n# not this\n```\n## Two\n\n#hash\n\nb"
    assert _by_heading(text) == ["# One\n\na\n```\n# not this\n```", "## Two\n\n#hash\n\nb"]
    assert _by_heading("text\n\n# One") == ["text\n", "# One"]
    assert _by_heading("") == []


def test_what_follows_a_bare_heading_stands_on_its_slide():
    cells = [v4.new_markdown_cell(text) for text in ("# One\n\na\n\n## Two", "b", "c")]
    kinds = [
        cell.metadata["slideshow"]["slide_type"]
        for cell in _cut(v4.new_notebook(cells=cells)).cells
    ]
    assert kinds == ["slide", "slide", "-", "subslide"]


def test_a_new_site_replaces_the_old_one(folder, tmp_path):
    out = tmp_path / "deep" / "site"
    build_site(folder, out)
    put(folder, STEMS[2], ran("print('second')", v4.new_output("stream", text="second\n")))
    assert build_site(folder, out) == out / "index.html"
    assert "second" in (out / f"{STEMS[2]}.html").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["site"]


def test_other_files_are_never_replaced(folder, tmp_path):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    (out / "index.html").write_text("mine too")
    assert "other files" in refusal(folder, out)
    assert "other files" in refusal(folder, folder)
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "thesis.txt"]
    assert (out / "index.html").read_text() == "mine too"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build", "mine"]


def spoil_missing(folder):
    (folder / f"{STEMS[2]}.ipynb").unlink()


def spoil_failed(folder):
    (folder / f"{STEMS[2]}.ipynb").rename(folder / f"{STEMS[2]}.failed.ipynb")


def spoil_all(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def spoil_text(folder, text="{"):
    (folder / f"{STEMS[2]}.ipynb").write_text(text)


def spoil_shape(folder):
    spoil_text(folder, '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": 3}')


def spoil_cell(folder):
    """A cell of code that has no place for its output."""
    path = folder / f"{STEMS[2]}.ipynb"
    content = json.loads(path.read_text())
    del content["cells"][1]["outputs"]
    path.write_text(json.dumps(content))


def spoil_bytes(folder):
    (folder / f"{STEMS[2]}.ipynb").write_bytes(base64.b64decode(PNG))


def spoil_error(folder):
    error = v4.new_output("error", ename="ZeroDivisionError", evalue="", traceback=[])
    put(folder, STEMS[2], ran("1 / 0", error))


def spoil_unrun(folder):
    put(folder, STEMS[2], v4.new_code_cell("print(1)"))


def spoil_record(folder):
    (folder / "records" / f"{STEMS[-1]}.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_missing, [STEMS[2], "No such file", "labkit run 03"]),
        (spoil_failed, [STEMS[2], "failed", "labkit run 03"]),
        (spoil_all, [STEMS[0], "No such file", "labkit run 01"]),
        (spoil_text, [STEMS[2], "not a notebook"]),
        (spoil_shape, [STEMS[2], "not a notebook"]),
        (spoil_cell, [STEMS[2], "not a notebook"]),
        (spoil_bytes, [STEMS[2], "not a notebook"]),
        (spoil_error, [STEMS[2], "cell 2", "ZeroDivisionError", "labkit run 03"]),
        (spoil_unrun, [STEMS[2], "cell 2", "not been run", "labkit run 03"]),
        (spoil_record, ["record", STEMS[-1]]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_the_whole_course_is_refused(folder, tmp_path, capfd, spoil, words):
    out = tmp_path / "site"
    out.mkdir()
    spoil(folder)
    line = refusal(folder, out)
    for word in words:
        assert word in line
    assert "".join(capfd.readouterr()) == "", "more than the one line"
    assert list(out.iterdir()) == [] and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("place", ["file", "file/site", "/proc/site", "\0"], ids=repr)
def test_an_unwritable_folder_is_refused(folder, tmp_path, place):
    (tmp_path / "file").write_text("kept")
    line = refusal(folder, tmp_path / place)
    assert "cannot write" in line
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build", "file"]


def test_one_line_on_the_command_line(tmp_path):
    command = [LABKIT, "report", "--from", "nowhere"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("labkit: ") and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# In a real browser.


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and chromedriver):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    folder = tmp_path_factory.mktemp("browser")
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
        f"--user-data-dir={folder}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()


def show(driver, path: Path, width: int, scheme: str) -> None:
    """Open a page in a window of that width, in light or dark, and wait until it is loaded."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get(path.as_uri())
    assert driver.execute_script("return document.readyState") == "complete"
    assert driver.get_log("browser") == []
    fetched = driver.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert all(name.startswith(("file:", "data:")) for name in fetched), fetched


# Brightness from 0 to 255 of an element's own or inherited background, and of its text.
BRIGHTNESS = """
const light = text => { const [r, g, b] = text.match(/[\\d.]+/g); return .3 * r + .6 * g + .1 * b };
const shown = document.querySelector(arguments[0]);
let ground = shown;
while (/, 0\\)|transparent/.test(getComputedStyle(ground).backgroundColor) && ground.parentElement)
    ground = ground.parentElement;
return [light(getComputedStyle(ground).backgroundColor), light(getComputedStyle(shown).color)];
"""


# What hides a part of its content, and pictures that the window cuts.
CLIPPED = """
const hides = e => getComputedStyle(e).overflowX == 'hidden' && e.scrollWidth > e.clientWidth + 1;
const cut = e => e.tagName == 'IMG' && e.getBoundingClientRect().right > innerWidth;
return [...document.querySelectorAll('main *')].filter(e => hides(e) || cut(e))
    .map(e => e.outerHTML.slice(0, 200));
"""
IS_TABLE = """
return [...document.querySelectorAll('.jp-RenderedHTML > pre')].map(e => getComputedStyle(e))
    .every(style => style.whiteSpace == 'pre' && style.fontFamily.includes('monospace'));
"""


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", ["index.html", *(f"{stem}.html" for stem in STEMS)])
def test_pages_fit_the_window_in_light_and_dark(driver, site, name, width):
    for scheme in ("light", "dark"):
        show(driver, site / name, width, scheme)
        scrolled = driver.execute_script("return document.documentElement.scrollWidth")
        assert scrolled <= width, "the page itself must not scroll sideways"
        clipped = driver.execute_script(CLIPPED)
        assert clipped == []
        assert driver.execute_script(IS_TABLE)
        for part in ("h1", "p", "pre", "a", *([".highlight .k"] if name != "index.html" else [])):
            ground, text = driver.execute_script(BRIGHTNESS, part)
            assert ground > 200 > text if scheme == "light" else ground < 60 < text, part


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("stem", STEMS)
def test_slides_are_shown_one_after_the_other(driver, site, stem, width):
    show(driver, site / f"{stem}.slides.html", width, "dark")
    assert driver.execute_script("return Reveal.isReady()")
    assert driver.execute_script(BRIGHTNESS, "h1")[0] < 60
    count, seen, pictures = driver.execute_script("return Reveal.getTotalSlides()"), set(), 0
    assert count > 10
    assert driver.execute_script("return Reveal.getScale()") > 0.6, "too small to read"
    driver.execute_script("Reveal.configure({transition: 'none'})")  # a moving slide has no place
    for _ in range(count):
        place, inside, found = driver.execute_script(
            "const slide = Reveal.getCurrentSlide(), at = Reveal.getIndices();"
            "const box = slide.getBoundingClientRect();"
            "const inside = box.left >= 0 && box.right <= innerWidth && box.bottom <= innerHeight;"
            "const found = slide.querySelectorAll('img').length;"
            "Reveal.next(); return [[at.h, at.v], inside, found]"
        )
        assert inside, place
        seen.add(tuple(place))
        pictures += found
    assert len(seen) == count and driver.execute_script("return Reveal.isLastSlide()")
    assert pictures == len(Page(site / f"{stem}.slides.html").alternatives)
