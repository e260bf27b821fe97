"""The page about runs in a real browser: it is drawn, nothing of it runs, and it fits a phone."""

import html
import os
import re
import shutil
import subprocess

import pytest
from folders import tezo
from reports import HOSTILE, Page, hostile, two_runs

INSTALL = "apt-get update && apt-get install -y --no-install-recommends chromium"
# A page in a frame, which it can't tell from a window: the browser's own are never as narrow as a phone. The script
# that measures is the frame's; the page is as it was written.
FRAME = """<!DOCTYPE html><title>not measured</title>
<iframe id="page" style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe>
<script>
onload = () => {{
  const inside = document.getElementById("page").contentDocument, root = inside.documentElement;
  inside.querySelectorAll("details").forEach(one => one.open = true);
  const texts = [], cut = [], shown = [];
  for (const axis of [1, 2, 3]) {{
    inside.querySelectorAll(`.axis-${{axis}}`).forEach(one => one.click());
    const charts = [...inside.querySelectorAll("svg.chart")].filter(svg => svg.getBoundingClientRect().height > 0);
    const words = charts.flatMap(svg => [...svg.querySelectorAll("text")]);
    texts.push(...words.map(one => one.getBoundingClientRect().height));
    cut.push(...charts.filter(svg => [...svg.querySelectorAll("text")].some(one => {{
      const a = one.getBoundingClientRect(), b = svg.getBoundingClientRect();
      return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1;
    }})));
    shown.push(...[...inside.querySelectorAll(".loss")].map(figure =>
      charts.filter(svg => figure.contains(svg)).map(svg => svg.ariaLabel.split(":")[0]).join("+")));
  }}
  const width = `wide ${{root.scrollWidth}} of ${{root.clientWidth}}`;
  document.title = `${{width}}, least text ${{Math.min(...texts)}}, cut ${{cut.length}}, shown ${{shown.join(", ")}}.`;
}};
</script>"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """Runs the browser: (file, flags) -> (standard output, standard error)."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["bash", "-c", INSTALL], capture_output=True, timeout=240, check=False)
        path = shutil.which("chromium")
    if path is None:
        pytest.skip(f"there is no chromium, and it can't be installed here; as root: {INSTALL}")
    profile = tmp_path_factory.mktemp("profile")

    def browse(file, *flags):
        common = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--virtual-time-budget=3000",
        )
        logged = ("--enable-logging=stderr", "--v=0", "--dump-dom", f"--user-data-dir={profile}")
        line = [path, *common, *logged, *flags, file.as_uri()]
        done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return browse


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report on a real run, and on one with markup wherever a stranger could put it."""
    root = tmp_path_factory.mktemp("home")
    home = two_runs(root)
    output = root / "page.html"
    done = tezo("report", home / "two", hostile(home, root), "--output", output)
    assert done.code == 0, done.err
    return output


def complaints(log):
    """What the page brought to the console, and what its policy forbade."""
    return [line for line in log.splitlines() if "CONSOLE" in line or "Content Security Policy" in line]


def test_a_browser_draws_the_curves_and_complains_of_nothing(chromium, page):
    dom, log = chromium(page)
    assert not complaints(log)
    shown = Page(dom)
    for run in (0, 1):
        drawn = [path["d"] for path in shown.of("path") if f"var(--c{run})" in path.get("style", "")]
        assert sum(len(d) > 60 for d in drawn) >= 3, run  # smoothed losses, the histogram
    assert len(shown.of("use")) > 3 * (8 + 12)  # the losses of the steps, in three charts
    assert not {"script", "img", "iframe", "link", "object"} & set(shown.tags)
    assert HOSTILE in "".join(shown.words)
    assert not any(name.startswith("on") or name == "src" for _, found in shown.attributes for name in found)
    assert all(found.get("href", "#").startswith("#") for _, found in shown.attributes)


def test_the_policy_of_the_page_stops_what_would_run_or_load(chromium, page, tmp_path):
    more = "<p id=mark></p><script>document.getElementById('mark').textContent = 'ran'</script>"
    bad = tmp_path / "bad.html"
    bad.write_text(page.read_text().replace("</main>", more + "<img src='http://127.0.0.1:9/x.png'></main>"))
    dom, log = chromium(bad)
    assert '<p id="mark"></p>' in dom
    assert len(complaints(log)) >= 2, log  # and this is how a violation reads


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_fits_and_its_charts_can_be_read(width, chromium, page, tmp_path):
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(page=html.escape(page.read_text()), width=width))
    dom, log = chromium(frame, "--hide-scrollbars", "--window-size=1300,1000")
    assert not complaints(log)
    title = re.search(r"<title>wide (\d+) of (\d+), least text ([\d.]+), cut (\d+), shown (.*?)\.<", dom)
    assert title, dom[:200]
    wide, window, text, cut = (float(value) for value in title.groups()[:4])
    axes = [f"Loss over {axis}" for axis in ("forward passes", "steps", "seconds") for _ in ("two", "the other")]
    assert title[5] == ", ".join(axes)  # of each kind of loss the one chart that was chosen
    assert wide == window == width
    assert text >= 11
    assert cut == 0
