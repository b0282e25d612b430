"""A notebook as people use it: JupyterLab in a browser, all cells run, a control moved."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from helpers import wait_until
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

selenium = pytest.importorskip("selenium")
from selenium.webdriver import Chrome, ChromeOptions, ChromeService, Keys  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "05_stream_pipeline.ipynb"
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
    pytest.mark.timeout(400),
]
# JupyterLab draws only the cells in sight, so what happened is asked of its model.
CELLS = """
const cells = window.jupyterapp.shell.currentWidget?.content?.model?.cells;
return cells ? Array.from(cells, cell => cell.toJSON()) : [];
"""
SHOW_CELL = """
const notebook = window.jupyterapp.shell.currentWidget.content;
notebook.activeCellIndex = arguments[0];
return notebook.scrollToItem(arguments[0], 'start');
"""


@contextmanager
def jupyterlab(folder: Path):
    """JupyterLab in `folder`, with settings of its own; the address to open a notebook at."""
    runtime = folder / "runtime"
    settings = {
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [
                sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root",
                "--ServerApp.port=0", "--LabApp.expose_app_in_browser=True",
                "--LabApp.news_url=", "--LabApp.check_for_updates_class="
                "jupyterlab.handlers.announcements.NeverCheckForUpdate",
            ],
            cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        about = runtime / f"jpserver-{server.pid}.json"
        assert wait_until(lambda: about.exists() or server.poll() is not None, 60)
        assert server.poll() is None, (folder / "server.log").read_text()
        found = json.loads(about.read_text())
        yield f"{found['url']}lab/tree/{{}}?token={found['token']}"
    finally:
        server.terminate()  # ends its kernels too
        try:
            server.wait(30)
        finally:
            server.kill()
            server.wait()


@contextmanager
def browser(folder: Path):
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
        "--window-size=1400,1000", f"--user-data-dir={folder / 'browser'}",
    ):  # fmt: skip
        options.add_argument(argument)
    driver = Chrome(options=options, service=ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def test_all_cells_run_in_jupyterlab_and_a_slider_redraws_the_figure(tmp_path):
    parameters = {"device": "emulated", "preset": "smoke", "batches": 6, "results_dir": "build"}
    notebook = parameterize_notebook(load_notebook_node(str(NOTEBOOK)), parameters)
    nbformat.write(notebook, tmp_path / "lab.ipynb")
    with jupyterlab(tmp_path) as address, browser(tmp_path) as driver:
        driver.get(address.format("lab.ipynb"))
        wait = WebDriverWait(driver, 120)
        wait.until(lambda _: len(driver.execute_script(CELLS)) == len(notebook.cells))
        driver.execute_script(
            "window.jupyterapp.shell.currentWidget.sessionContext.ready.then("
            "() => window.jupyterapp.commands.execute('notebook:run-all-cells'))"
        )

        def finished(_):
            code = [cell for cell in driver.execute_script(CELLS) if cell["cell_type"] == "code"]
            found = [
                out for cell in code for out in cell["outputs"] if out["output_type"] == "error"
            ]
            assert not found, found
            return all(cell["execution_count"] for cell in code)

        WebDriverWait(driver, 240, poll_frequency=1).until(finished)
        sources = ["".join(cell["source"]) for cell in driver.execute_script(CELLS)]
        place = next(i for i, source in enumerate(sources) if "labkit.explore(" in source)
        driver.execute_script(SHOW_CELL, place)
        picture = wait.until(lambda _: driver.find_element(By.CSS_SELECTOR, ".widget-html img"))
        before, said = picture.get_attribute("src"), picture.get_attribute("alt")
        assert said.startswith("Timeline. stream_pipeline")
        slider = wait.until(lambda _: _slider(driver, "workers"))
        for _ in range(3):
            slider.send_keys(Keys.ARROW_RIGHT)

        def redrawn(_):  # each time by another element
            picture = driver.find_element(By.CSS_SELECTOR, ".widget-html img")
            return picture.get_attribute("src") != before

        ignored = [selenium.common.exceptions.StaleElementReferenceException]
        WebDriverWait(driver, 60, ignored_exceptions=ignored).until(redrawn)
        assert finished(None)


def _slider(driver, name: str):
    """The handle of the slider called `name`; None until it is drawn."""
    for box in driver.find_elements(By.CSS_SELECTOR, ".widget-slider, .widget-inline-hbox"):
        if box.text.startswith(name):
            for handle in box.find_elements(By.CSS_SELECTOR, ".noUi-handle"):
                return handle
    return None
