"""The executed course as a static site: an index, and a page and a deck of slides for each lab.

nbconvert's own templates make them. What is changed here makes them readable without a network,
in light and dark, on a phone and on a projector.
"""

import base64
import copy
import html
import importlib.util
import io
import os
import re
import shutil
from pathlib import Path

from .errors import LabError
from .notebooks import find_notebooks
from .results import ladder_table, load_record

# The scripts that these blocks fetch from the net are for formulas, diagrams and widgets.
_PAGE = """{% extends 'index.html.j2' %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block notebook_css %}
{{ super() }}
{{ resources.include_css("static/theme-dark.css") | string
   | replace('type="text/css"', 'media="(prefers-color-scheme: dark)"') }}
<style>
:root { color-scheme: light dark }
main { max-width: 62rem; margin: auto }
.jp-InputArea-editor .highlight { overflow-x: auto }
.jp-RenderedHTMLCommon > pre { overflow-x: auto; white-space: pre; font-family: monospace }
.jp-RenderedText pre { word-break: normal; overflow-wrap: anywhere }
</style>
{% endblock %}
"""
_SLIDES = (
    _PAGE
    + """{% block html_head_css %}
<meta name="viewport" content="width=device-width, initial-scale=1.0" />
<style>
main { max-width: none }
html:root { --r-heading-text-transform: none }
.reveal pre { box-sizing: border-box }
.reveal .jp-RenderedMarkdown pre { font-size: 90% }
.reveal .slides section section { text-align: left; max-height: 100%; overflow-y: auto }
@media (prefers-color-scheme: dark) {
  html:root { --r-background-color: #111; --r-main-color: #eee; --r-heading-color: #eee }
}
</style>
{% endblock %}
{% block footer_js %}
<script src="reveal.js/dist/reveal.js"></script>
<script>
const [width, height] = innerWidth < 600 ? [550, 1000] : [1100, 750];
Reveal.initialize({ hash: true, center: false, width, height, scrollActivationWidth: 0 });
</script>
{% endblock %}
"""
)
# What a deck loads of reveal.js, and its licence.
_REVEAL = "LICENSE", "dist/reveal.css", "dist/reveal.js", "dist/theme/white.css"
_FONT = "dist/theme/fonts/source-sans-pro"
_HEADING = re.compile("#+ ")


def build_site(folder: str | Path, out: str | Path) -> Path:
    """Make a site in `out` of what `labkit run --out FOLDER` left in `folder`.

    Returns its index page. A site that is there already is replaced as a whole. Raises LabError,
    and leaves `out` as it was, when a lab is missing, failed or cannot be read, when there is no
    record of the last one, and when `out` cannot be written or holds other files.
    """
    folder, out = Path(folder), Path(out)
    stems = [path.stem for path in find_notebooks([])]
    labs = {stem: _read(folder, stem) for stem in stems}
    record = load_record(folder / "records" / f"{stems[-1]}.json")
    pages = {"index.html": _export(_index(labs, record), _PAGE, exclude_input=True)}
    for stem, notebook in labs.items():
        page, slides = f"{stem}.html", f"{stem}.slides.html"
        pages[page] = _export(_linked(notebook, ".html", f"[Slides]({slides})"), _PAGE)
        deck = _cut(_linked(notebook, ".slides.html", f"[Page]({page})"))
        pages[slides] = _export(deck, _SLIDES)
    _write(pages, out)
    return out / "index.html"


def _read(folder: Path, stem: str):
    """The executed notebook, fit to be shown: no error, no widget, no path of this machine."""
    import nbformat

    path, again = folder / f"{stem}.ipynb", f"labkit run {stem[:2]} --out {folder}"
    if (failed := folder / f"{stem}.failed.ipynb").exists():
        raise LabError(f"{stem} has failed, see {str(failed)!r}: mend it, then {again}")
    try:
        notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))
        nbformat.validate(notebook)
    except OSError as error:
        raise LabError(f"cannot read {str(path)!r}: {error.strerror}; try {again}") from None
    except Exception as error:
        raise LabError(f"{str(path)!r} is not a notebook: {type(error).__name__}") from None
    paths = _paths(folder, notebook)
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        if cell.execution_count is None:
            raise LabError(f"{stem}: cell {number} has not been run: {again}")
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.source = paths.sub("…/", cell.source)
        for output in cell.outputs:
            if output.output_type == "error":
                raise LabError(f"{stem}: cell {number} ended with {output.ename}: {again}")
            _clean(output, paths, f"Output of {cell.source.strip().splitlines()[0]}")
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title = re.search(r"^# (.*)$", text, re.MULTILINE)
    # Without the state of its widgets a notebook shows none.
    notebook.metadata = {"title": title[1] if title else stem}
    return notebook


def _paths(folder: Path, notebook) -> re.Pattern:
    """Finds the folders before a file's name: of any absolute path without spaces, and of those
    that the notebook was given. Not in an address, a closing tag, or a picture's data."""
    given = notebook.metadata.get("papermill", {}).get("parameters", {}).values()
    known = [folder.resolve(), *(Path(text) for text in given if str(text).startswith("/"))]
    parents = sorted((re.escape(f"{path.parent}/") for path in known), key=len, reverse=True)
    return re.compile(rf"""(?<![\w.:/<+,])(?:{"|".join(parents)}|/(?:[^\s/"'<>:,;()]+/)+)""")


def _clean(output, paths: re.Pattern, otherwise: str) -> None:
    """Hide paths, and give pictures the text alternative that the templates leave out."""
    if output.output_type == "stream":
        output.text = paths.sub("…/", output.text)
        return
    data = output.data
    for kind in [kind for kind in data if kind.startswith("text/")]:
        data[kind] = paths.sub("…/", data[kind])
    for kind in [kind for kind in data if kind in ("image/png", "image/jpeg")]:
        alt = output.metadata.get(kind, {}).get("alt") or otherwise
        data["text/html"] = _picture(kind, data[kind], paths.sub("…/", alt))


def _picture(kind: str, encoded: str, alt: str) -> str:
    source = f"data:{kind};base64,{''.join(encoded.split())}"
    return f'<img alt="{html.escape(alt)}" src="{source}">'


def _index(labs: dict, record: dict):
    """A notebook with the list of labs and the ladder of `record`."""
    from nbformat import v4
    from rich.console import Console

    from .plots import plot_ladder

    console = Console(record=True, width=100, file=io.StringIO())
    console.print(ladder_table(record))
    figure, png = plot_ladder(record), io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    encoded = base64.b64encode(png.getvalue()).decode()
    shown = (
        console.export_html(inline_styles=True, code_format="<pre>{code}</pre>"),
        _picture("image/png", encoded, figure.get_label()),
    )
    title = "Getting a model's output off the GPU"
    lines = [f"# {title}", "The five labs, as they were run."]
    lines += [
        f"* [{notebook.metadata['title']}]({stem}.html) ([slides]({stem}.slides.html))"
        for stem, notebook in labs.items()
    ]
    lines += ["## The ladder", f"From the record of the last lab, {record['created'][:10]}."]
    outputs = [v4.new_output("display_data", {"text/html": text}) for text in shown]
    cells = [v4.new_markdown_cell("\n\n".join(lines)), v4.new_code_cell(outputs=outputs)]
    return v4.new_notebook(cells=cells, metadata={"title": title})


def _linked(notebook, suffix: str, way: str):
    """A copy whose links lead to the site's files, with `way` and one to the index on top."""
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((\w+)\.ipynb", rf"](\1{suffix}", cell.source)
    first = notebook.cells[0]
    first.source = f"{first.source.rstrip()}\n\n[All labs](index.html) · {way}"
    return notebook


def _cut(notebook):
    """The notebook in slides: one for each heading, and below it one for each further cell.

    What follows a heading without text stands on the heading's slide.
    """
    cells, bare = [], False
    for cell in notebook.cells:
        pieces = _by_heading(cell.source) if cell.cell_type == "markdown" else [cell.source]
        for number, text in enumerate(pieces):
            piece = copy.deepcopy(cell)
            piece.id, piece.source = f"{cell.id}-{number}", text
            heading = piece.cell_type == "markdown" and _HEADING.match(text)
            kind = "slide" if heading else "-" if bare else "subslide"
            piece.metadata["slideshow"] = {"slide_type": kind}
            bare = heading and len(text.splitlines()) == 1
            cells.append(piece)
    notebook.cells = cells
    return notebook


def _by_heading(text: str) -> list[str]:
    """The text in pieces that begin at its headings; a `#` in a block of code is none."""
    pieces, in_code = [], False
    for line in text.strip().splitlines():
        in_code ^= line.startswith("```")
        if not pieces or (_HEADING.match(line) and not in_code):
            pieces.append(line)
        else:
            pieces[-1] += f"\n{line}"
    return pieces


def _export(notebook, template: str, **options) -> str:
    from nbconvert import HTMLExporter, SlidesExporter

    if template is _SLIDES:
        options |= {"reveal_url_prefix": "reveal.js", "reveal_theme": "white"}
    exporter = (SlidesExporter if template is _SLIDES else HTMLExporter)(
        raw_template=template,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
        **options,
    )
    return exporter.from_notebook_node(notebook)[0]


def _write(pages: dict[str, str], out: Path) -> None:
    """Write the site beside `out`, then let it take the place of the old one."""
    # Not imported: that would load all of Sphinx.
    package = importlib.util.find_spec("sphinx_revealjs").submodule_search_locations[0]
    reveal, place = Path(package, "_static", "revealjs"), out.absolute()
    new, old = (place.with_name(f".{place.name}.{os.getpid()}.{age}") for age in ("new", "old"))
    try:
        shutil.copytree(reveal / _FONT, new / "reveal.js" / _FONT)
        for name in _REVEAL:
            shutil.copyfile(reveal / name, new / "reveal.js" / name)
        for name, text in pages.items():
            (new / name).write_text(text, encoding="utf-8")
        if place.exists():
            others = {path.name for path in place.iterdir()} - {path.name for path in new.iterdir()}
            if others:
                raise LabError(f"{str(out)!r} holds other files: choose another folder")
            place.rename(old)
        new.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LabError(f"cannot write the site {str(out)!r}: {reason}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
