"""A report in a headless Chromium draws, responds to buttons and the mouse, and logs no error."""

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from sodaopt.lab.records import find
from tests.support import browser
from tests.support.lab_runs import NASTY, comparison, fake

pytest.importorskip("rich")

from sodaopt.lab.report import text, write_report
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


def wait(chromium, milliseconds=80):
    chromium.ask(f"new Promise((done) => setTimeout(done, {milliseconds}))")


def click(chromium, section, name):
    script = f"""[...document.querySelectorAll('{section} button')]
      .find((button) => button.textContent.startsWith('{name}')).click()"""
    chromium.ask(script)
    wait(chromium)


def opened(chromium, folder, width=1200):
    chromium.view(width)
    chromium.open(write_report(find([folder]), folder.parent / "report.html", NASTY))
    wait(chromium, 200)


def test_the_page_in_a_browser(tmp_path, chromium):
    folder = tmp_path / "runs"
    comparison(folder)
    for wd in (0.1, 0.2):
        fake(folder, "muon", wd=wd, final=3.55 + wd / 10)
    fake(folder, NASTY, 0, final=3.8, sample=NASTY)
    opened(chromium, folder)
    chromium.wait("document.querySelectorAll('canvas').length === 4")
    assert all(count > 2000 for count in chromium.ask(INK))
    assert chromium.ask("document.title") == NASTY
    order = "[...document.querySelectorAll('section:not([hidden])')].map((s) => s.id).slice(0, 5)"
    assert chromium.ask(order) == ["results", "sweeps", "gap", "val", "train"]
    _buttons_change_the_chart(chromium)
    _the_mouse_reads_and_zooms(chromium)
    _keys_read_the_chart(chromium)
    _the_theme_follows_the_system_and_the_button(chromium)
    chromium.view(390)
    chromium.wait("document.querySelector('#val canvas').clientWidth < 390")
    assert chromium.ask("document.documentElement.scrollWidth") == 390, "nothing sticks out"
    assert chromium.said == []


REACH = """(() => { const shown = new Map([["a", true]]), view = { logX: false };
  %s
  return reach({ series: [{}], data: [[...Array(%d).keys()], %s] }, [{ label: "a" }],
               { settle: true, logY: false }); })()"""


def test_a_chart_of_few_points_has_the_first_of_them(tmp_path, chromium):
    """With more points the steep start is left out."""
    chromium.open(write_report([fake(tmp_path)], tmp_path / "report.html", "few"))
    code = asset("curves.js")
    reach = code[code.index("function reach") : code.index("/** Return the closest point")]
    for losses, start in (([7, 3.5], True), ([7, 4, 3.5], True), ([7, 4, 3.7, 3.5], False)):
        low, high = chromium.ask(REACH % (reach, len(losses), losses))
        assert low < 3.5
        assert (high > 7) == start


PRESSED = """[...document.querySelectorAll('#gap .group button[aria-pressed=true]')]
  .map((button) => button.textContent)"""


def _buttons_change_the_chart(chromium):
    first = shot = chromium.ask(PICTURE)
    assert chromium.ask(PRESSED) == ["steps", "whole run"]
    for section, name in (("#gap", "log x"), ("#val", "log y"), ("#gap", "tokens"),
                          ("#gap", "time"), ("#gap", "last third"),
                          ("#val", "muon wd")):  # fmt: skip
        click(chromium, section, name)
        new = chromium.ask(PICTURE)
        assert new != shot, name
        shot = new
    assert chromium.ask(PRESSED) == ["time", "log x", "last third"], "the zoom survives"
    off = "document.querySelector('#val .legend button[aria-pressed=false] .name').textContent"
    assert chromium.ask(off).startswith("muon wd")
    for section, name in (("#gap", "log x"), ("#val", "log y"), ("#gap", "steps"),
                          ("#gap", "whole run"), ("#val", "muon wd")):  # fmt: skip
        click(chromium, section, name)
    assert chromium.ask(PICTURE) == first
    before = chromium.ask("document.querySelector('#train canvas').toDataURL()")
    click(chromium, "#train", "10 %")
    assert chromium.ask("document.querySelector('#train canvas').toDataURL()") != before


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
    linked = "document.querySelector('#gap .tip').textContent"
    assert chromium.ask(linked).startswith("100 steps"), "the cursors are linked"
    chromium.ask(f"window.whole = {PICTURE}; 0")
    chromium.mouse("mousePressed", left + width * 0.5, y, 1)
    chromium.mouse("mouseMoved", left + width * 0.8, y, 1)
    chromium.mouse("mouseReleased", left + width * 0.8, y, 1)
    chromium.wait(f"{PICTURE} !== window.whole")
    wait(chromium)
    assert chromium.ask(PRESSED) == ["steps"], "neither the whole run nor the last third"
    click(chromium, "#val", "log y")
    click(chromium, "#val", "log y")
    assert chromium.ask(f"{PICTURE} !== window.whole"), "the zoom survives another axis"
    left, top, width, height = chromium.ask(script)
    y = top + height / 2
    for clicks in (1, 2):
        chromium.mouse("mousePressed", left + width * 0.5, y, clicks)
        chromium.mouse("mouseReleased", left + width * 0.5, y, clicks)
    chromium.wait(f"{PICTURE} === window.whole")


def _keys_read_the_chart(chromium):
    press = """(() => { const plot = document.querySelector('#val .plot'); plot.focus();
      for (const key of %s) plot.dispatchEvent(new KeyboardEvent('keydown', { key }));
      return [document.activeElement === plot, document.querySelector('#val .spoken').textContent];
    })()"""
    focused, said = chromium.ask(press % '["Home", "ArrowRight"]')
    assert focused
    assert said.startswith("20 steps: ")
    assert "soda(muon)" in said
    assert chromium.ask(press % '["End"]')[1].startswith("200 steps: ")
    chromium.ask(press % '["Escape"]')


def _the_theme_follows_the_system_and_the_button(chromium):
    paper, white, black = "getComputedStyle(document.body).backgroundColor", *PAPERS
    chromium.ask(f"window.light = {PICTURE}; 0")
    chromium.view(1200, dark=True)
    chromium.wait(f"{paper} === '{black}' && {PICTURE} !== window.light")
    chromium.ask("document.getElementById('theme').click()")
    chromium.wait(f"{paper} === '{white}' && {PICTURE} === window.light")
    chromium.ask("document.getElementById('theme').click()")
    chromium.wait(f"{paper} === '{black}'")


def test_the_command_and_the_numbers_can_be_copied(tmp_path, chromium):
    comparison(tmp_path / "runs")
    runs, out = find([tmp_path / "runs"]), tmp_path / "report.html"
    chromium.view(1200)
    chromium.open(write_report(runs, out, "t", command="sodaopt compare muon 'soda(muon)'"))
    chromium.ask("""window.copied = []; navigator.clipboard.writeText = async (text) => {
      window.copied.push(text); }; 0""")
    for name in ("Copy command", "Copy CSV", "Copy BibTeX"):
        click(chromium, ".copies", name)
    command, table, entry = chromium.ask("window.copied")
    assert command == "sodaopt compare muon 'soda(muon)'"
    lines = table.splitlines()
    assert (lines[0], len(lines)) == ("optimizer,seed,status,val_loss", 10)
    assert lines[1] == f"muon,0,finished,{runs[0].val_loss}"
    assert entry.startswith("@software{sodaopt,")


def test_a_page_that_loads_again_keeps_the_view(tmp_path, chromium):
    comparison(tmp_path / "runs")
    opened(chromium, tmp_path / "runs")
    click(chromium, "#gap", "tokens")
    click(chromium, "#val", "adamw")
    shot = chromium.ask(PICTURE)
    chromium.call("Page.reload")
    chromium.wait("document.querySelectorAll('canvas').length === 3")
    wait(chromium, 200)
    assert chromium.ask(PRESSED) == ["tokens", "whole run"]
    assert chromium.ask(PICTURE) == shot


def test_a_hidden_line_does_not_keep_the_focus(tmp_path, chromium):
    comparison(tmp_path / "runs")
    opened(chromium, tmp_path / "runs")
    button = "document.querySelectorAll('#val .legend button')[0]"
    hover = "new MouseEvent('mouseenter')"
    chromium.ask(f"{button}.dispatchEvent({hover}), {button}.click(), 0")
    wait(chromium)
    chromium.ask(f"window.hidden = {PICTURE}; 0")
    chromium.ask(f"{button}.dispatchEvent(new MouseEvent('mouseleave')), 0")
    wait(chromium)
    assert chromium.ask(f"{PICTURE} === window.hidden"), "the other lines are not dimmed"


VISIBLE = """[...document.querySelectorAll('.results tr')].map((row) => [...row.cells]
  .filter((cell) => cell.getClientRects().length).map((cell) => [
    cell.closest('thead') ? cell.textContent : cell.dataset.label,
    Math.round(cell.getBoundingClientRect().left)]))"""
WIDER = """(() => { const frame = document.querySelector('.results').parentElement;
  return frame.scrollWidth > frame.clientWidth; })()"""


@pytest.mark.parametrize("new", [None, "a column with a rather long name"])
def test_each_cell_is_under_its_header(new, tmp_path, chromium, monkeypatch):
    """If the table is too wide, both leave out the same columns. `new` is the name of a column."""
    comparison(tmp_path / "runs")
    fake(tmp_path / "runs", "lion", status="diverged")  # so the page has the column of the status
    columns = list(text.COLUMNS)
    if new:
        columns.insert(3, text.measured(new, "step_seconds", 9, text.milliseconds))
        monkeypatch.setattr(text, "COLUMNS", columns)
    for width in (1200, 900):
        opened(chromium, tmp_path / "runs", width)
        head, *rows = chromium.ask(VISIBLE)
        assert rows == [head] * 4
        assert not chromium.ask(WIDER)
        names = [name for name, _ in head]
        out = sorted(column.drop for column in columns if column.name not in names)
        assert out == sorted(filter(None, (column.drop for column in columns)))[: len(out)]


# -- many runs ------------------------------------------------------------------------------------


def sweep(folder):
    """192 runs: two optimizers, eight learning rates, four weight decays, three seeds.

    At the largest learning rate, one seed of three survives, with the lowest loss of all.
    """
    for optimizer in ("adamw", "muon"):
        for j in range(8):
            for wd in (0.0, 0.5, 1.0, 2.0):
                for seed in range(3):
                    loss = 4 + abs(j - 4) / 20 + abs(wd - 0.5) / 50 + (optimizer == "muon") / 200
                    fake(folder, optimizer, seed, lr=2.0 ** (j - 12), wd=wd, every=40,
                         final=(3.9 if j == 7 else loss) + seed / 100,
                         status="diverged" if j == 7 and seed else "finished")  # fmt: skip


BEST_IN_VIEW = """[...document.querySelectorAll('.heat .best')].map((cell) => {
  const [box, frame] = [cell, cell.closest('.wide')].map((e) => e.getBoundingClientRect());
  return box.left >= frame.left && box.right <= frame.right; })"""
ROWS = """[...document.querySelectorAll('.long tbody tr')].filter((row) => !row.hidden)
  .map((row) => row.dataset.variant)"""


def test_a_sweep_of_192_runs(tmp_path, chromium):
    sweep(tmp_path / "runs")
    opened(chromium, tmp_path / "runs")
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
    assert chromium.ask("document.querySelectorAll('.heat').length") == 2
    assert chromium.ask("document.querySelectorAll('.legend button').length") == 0
    rows = chromium.ask(ROWS)
    assert (len(rows), rows[0]) == (64, "adamw lr=2⁻⁸ wd=0.5")
    assert all("lr=2⁻⁵" in label for label in rows[-8:]), "diverged ones come last"
    lit = "document.querySelectorAll('.long .line[aria-pressed=true]').length"
    assert chromium.ask(lit) == 2, "the best of each optimizer"
    shot = chromium.ask(PICTURE)
    click(chromium, ".long tbody", "adamw lr=2⁻⁸ wd=1")
    assert chromium.ask(lit) == 3
    assert chromium.ask(PICTURE) != shot
    search = "document.querySelector('input[type=search]')"
    chromium.ask(f"{search}.value = 'muon wd=2'; {search}.dispatchEvent(new Event('input')); 0")
    assert len(chromium.ask(ROWS)) == 8
    chromium.ask(f"{search}.value = ''; {search}.dispatchEvent(new Event('input')); 0")
    click(chromium, ".long thead", "val loss")
    click(chromium, ".long thead", "val loss")
    values = """[...document.querySelectorAll('.long td[data-label="val loss"]')]
      .map((cell) => +cell.dataset.value)"""
    found = chromium.ask(values)
    assert found == sorted(found, reverse=True)
    for width in (1200, 390):
        chromium.view(width)
        wait(chromium)
        assert chromium.ask("document.documentElement.scrollWidth") == width
    opened(chromium, tmp_path / "runs", 390)
    assert chromium.ask(BEST_IN_VIEW) == [True, True]
    assert chromium.said == []


def winner_of_the_files(folder):
    """Return the best settings by the JSON lines only. An unfinished run has an infinite loss."""
    losses = {}
    for file in folder.rglob("run.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        job, end = lines[0]["job"], lines[-1]
        key = job["optimizer"], job["lr"], job["wd"]
        losses.setdefault(key, []).append(end["val_loss"] or math.inf)
    return min(losses, key=lambda key: sum(losses[key]) / len(losses[key]))


def test_the_page_names_the_winner_of_the_files(tmp_path, chromium):
    """The first sentence, the first row and the ring of the heat map have the same winner."""
    sweep(tmp_path / "runs")
    optimizer, lr, wd = winner_of_the_files(tmp_path / "runs")
    power = str(round(math.log2(lr))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    label = f"{optimizer} lr=2{power} wd={wd:g}"
    opened(chromium, tmp_path / "runs")
    assert (
        chromium.ask("document.querySelector('.headlines b, .headlines strong').textContent")
        == label
    )
    assert chromium.ask(ROWS)[0] == label
    ring = f"""(() => {{ const map = [...document.querySelectorAll('#heat .panel')]
      .find((panel) => panel.querySelector('h3').textContent === '{optimizer}');
      const cell = map.querySelector('.best');
      return [map.querySelectorAll('thead th')[cell.cellIndex].textContent,
              cell.parentElement.cells[0].textContent]; }})()"""
    assert chromium.ask(ring) == [f"2{power}", f"{wd:g}"]


# -- accessibility --------------------------------------------------------------------------------

FAULTS = """axe.run(document, { resultTypes: ["violations", "incomplete"] }).then((found) =>
  [...found.violations, ...found.incomplete].flatMap((rule) =>
    rule.nodes.map((node) => `${rule.id} ${node.target} ${node.any[0]?.message}`)))"""
PAINT = """document.head.append(Object.assign(document.createElement('style'),
  { textContent: '.heat td.gone { background: %s }' })); 0"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_fault(dark, tmp_path, chromium):
    """Axe checks names, roles, and a contrast of at least 4.5, also for lines that are off.

    Axe cannot judge hatched cells, so it sees them in each of their two colours.
    """
    pytest.importorskip("axe_playwright_python")
    axe = Path(find_spec("axe_playwright_python").origin).parent / "axe.min.js"
    comparison(tmp_path / "few")
    sweep(tmp_path / "many" / "runs")
    for folder in (tmp_path / "few", tmp_path / "many" / "runs"):
        opened(chromium, folder)
        chromium.view(1200, dark=dark)
        chromium.ask("document.querySelector('#val .legend button, .long .line')?.click()")
        wait(chromium)
        chromium.ask(axe.read_text() + "; 0")
        for colour in ("var(--wash)", "var(--hatch)"):
            chromium.ask(PAINT % colour)
            assert chromium.ask(FAULTS) == []


def test_words_do_not_break(tmp_path, chromium):
    fake(tmp_path / "runs", head={"data": {"name": "embedded", "fingerprint": "a" * 64}})
    opened(chromium, tmp_path / "runs", 390)
    lines = """[...document.querySelectorAll('dt')].map((dt) => {
      const range = document.createRange(); range.selectNodeContents(dt);
      return range.getClientRects().length; })"""
    assert set(chromium.ask(lines)) == {1}
