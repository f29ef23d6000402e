"""A report in a headless Chromium draws, responds to buttons and the mouse, and logs no error."""

import pytest

from sodaopt.lab.records import find
from tests.support import browser
from tests.support.lab_runs import NASTY, comparison, fake

pytest.importorskip("rich")

from sodaopt.lab.report import write_report
from sodaopt.lab.report.page import asset

# Number of painted pixels, counted in a copy, because Chromium warns of reads from a canvas.
INK = """[...document.querySelectorAll('canvas')].map((canvas) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const context = copy.getContext('2d', { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((x, j) => j % 4 === 3 && x > 0).length;
})"""
PICTURE = "document.querySelector('#val canvas').toDataURL()"
PAPERS = ("rgb(255, 255, 255)", "rgb(17, 19, 23)")


@pytest.fixture
def chromium(tmp_path):
    if not browser.found():
        pytest.skip("no Chromium found: install the package chromium, or set CHROMIUM to its path")
    running = browser.Browser(tmp_path / "profile")
    yield running
    running.close()


def click(chromium, section, name):
    script = f"""[...document.querySelectorAll('{section} button')]
      .find((button) => button.textContent.startsWith('{name}')).click()"""
    chromium.ask(script)
    chromium.ask("new Promise((done) => setTimeout(done, 60))")


def test_the_page_in_a_browser(tmp_path, chromium):
    folder = tmp_path / "runs"
    comparison(folder)
    for wd in (0.1, 0.2):
        fake(folder, "muon", wd=wd, final=3.55 + wd / 10)
    fake(folder, NASTY, 0, final=3.8, sample=NASTY)
    out = write_report(find([folder]), tmp_path / "report.html", NASTY)
    chromium.view(1200)
    chromium.open(out)
    chromium.wait("document.querySelectorAll('canvas').length === 3")
    chromium.ask("new Promise((done) => setTimeout(done, 100))")
    assert all(count > 2000 for count in chromium.ask(INK))
    assert chromium.ask("document.title") == NASTY
    _buttons_change_the_chart(chromium)
    _the_mouse_reads_and_zooms(chromium)
    _the_theme_follows_the_system_and_the_button(chromium)
    chromium.view(390)
    chromium.wait("document.querySelector('#val canvas').clientWidth < 390")
    assert chromium.ask("document.documentElement.scrollWidth") == 390, "nothing sticks out"
    assert chromium.said == []


REACH = """(() => { %s
  return reach({ series: [{}], data: [[...Array(%d).keys()], %s] },
               { shown: [true], log: { x: false, y: false } }); })()"""


def test_a_chart_of_few_points_has_the_first_of_them(tmp_path, chromium):
    """With more points the steep start is left out."""
    chromium.open(write_report([fake(tmp_path)], tmp_path / "report.html", "few"))
    for losses, start in (([7, 3.5], True), ([7, 4, 3.5], True), ([7, 4, 3.7, 3.5], False)):
        low, high = chromium.ask(REACH % (asset("curves.js"), len(losses), losses))
        assert low < 3.5
        assert (high > 7) == start


def _buttons_change_the_chart(chromium):
    first = shot = chromium.ask(PICTURE)
    for name in ("log x", "log y", "tokens", "time", "last third", "muon wd"):
        click(chromium, "#val", name)
        new = chromium.ask(PICTURE)
        assert new != shot, name
        shot = new
    off = "document.querySelector('#val .legend button[aria-pressed=false] .name').textContent"
    assert chromium.ask(off).startswith("muon wd")
    for name in ("log x", "log y", "steps", "muon wd"):
        click(chromium, "#val", name)
    assert chromium.ask(PICTURE) == first


def _the_mouse_reads_and_zooms(chromium):
    script = """(() => { const over = document.querySelector('#val .u-over');
      over.scrollIntoView({ block: 'center' });
      const box = over.getBoundingClientRect();
      return [box.left, box.top, box.width, box.height]; })()"""
    left, top, width, height = chromium.ask(script)
    y = top + height / 2
    chromium.mouse("mouseMoved", left + width * 0.3, y)
    chromium.mouse("mouseMoved", left + width * 0.5, y)
    chromium.wait("!document.querySelector('#val .tip').hidden")
    said = chromium.ask("document.querySelector('#val .tip').textContent")
    assert said.startswith("100 steps")
    assert "soda(muon)" in said
    chromium.ask(f"window.whole = {PICTURE}; 0")
    chromium.mouse("mousePressed", left + width * 0.5, y, 1)
    chromium.mouse("mouseMoved", left + width * 0.8, y, 1)
    chromium.mouse("mouseReleased", left + width * 0.8, y, 1)
    chromium.wait(f"{PICTURE} !== window.whole")
    for clicks in (1, 2):
        chromium.mouse("mousePressed", left + width * 0.5, y, clicks)
        chromium.mouse("mouseReleased", left + width * 0.5, y, clicks)
    chromium.wait(f"{PICTURE} === window.whole")


def _the_theme_follows_the_system_and_the_button(chromium):
    paper, white, black = "getComputedStyle(document.body).backgroundColor", *PAPERS
    chromium.ask(f"window.light = {PICTURE}; 0")
    chromium.view(1200, dark=True)
    chromium.wait(f"{paper} === '{black}' && {PICTURE} !== window.light")
    chromium.ask("document.getElementById('theme').click()")
    chromium.wait(f"{paper} === '{white}' && {PICTURE} === window.light")
    chromium.ask("document.getElementById('theme').click()")
    chromium.wait(f"{paper} === '{black}'")
