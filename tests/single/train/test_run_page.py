"""The page of a run: its structure for screen readers, values under the pointer, and any names and numbers."""

import json
import math
import re
import shutil
import subprocess
import urllib.parse
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.timeline import RankTimes
from mpistrat.train import machine
from mpistrat.train.curves import powers, ticks
from mpistrat.train.html_page import document
from mpistrat.train.machine import RankPlace
from mpistrat.train.run_page import RunRecord, files_of, page

HOSTILE = "\"'></table><script>alert(1)</script><!--&amp;"
EMPTY = {"meta", "line", "polyline", "circle", "br"}


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))
def test_ticks_enclose_what_they_measure(a, b):
    low, high = sorted((a, b))
    found = ticks(low, high)
    assert found[0] <= low + 1e-6 * abs(low) + 1e-300 and found[-1] >= high - 1e-6 * abs(high) - 1e-300
    assert 2 <= len(found) <= 8
    assert len(set(found)) == len(found)


@given(st.floats(1e-300, 1e300), st.floats(2, 1e20))
def test_powers_enclose_what_they_measure(low, factor):
    high = min(low * factor, 1e300)
    found = powers(low, high)
    assert found[0] <= low * 1.0000001 and found[-1] * 1.0000001 >= high and len(found) <= 9


def times(rank, host="a<b", **more):
    shares = {"input": 0.1, "compute": 0.5, "communication": 0.1, "waiting": 0.2, "saving": 0.0}
    return RankTimes(rank, host, 9.0, **shares, steps=9, last=0, compared=9, cost=0.0)._replace(**more)


def record(**results):
    epochs = [
        {"epoch": i, "step": 5 * i, "seconds": 1.0, "samples_per_second": 10.0, **{k: v[i] for k, v in results.items()}}
        for i in range(len(next(iter(results.values()))))
    ]
    return RunRecord("a & b", "ended", {"x": "<y>"}, epochs, [times(0)], warnings=["<w>"])


def everything(name, results="loss"):
    """Return a page with all sections, each text of which is `name`."""
    names = (results, f"val_{results}")
    epochs = [
        {"epoch": i, "step": i, **dict.fromkeys(names[: 2 - i % 2], 1.0 + i), "seconds": 1.0, "samples_per_second": 2.0}
        for i in range(3)
    ]
    ranks = [times(0, name), times(1, name, last=3, cost=1.0)]
    places = [RankPlace(name, (name, "cpu:0"), 2, 8 * 10**9, "")] * 2
    files = [(name, name), ("trace.json.gz", "trace")]
    return page(RunRecord(name, name, {name: name}, epochs, ranks, places, [10**8, 2 * 10**8], files, [name]))


class Outline(HTMLParser):
    """Checks that elements are closed in order, and notes each with its attributes, and the text in it."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs)
        self.found.append((tag, dict(attrs), tuple(self.open)))
        self.texts.append("")
        if tag not in EMPTY:
            self.open.append(len(self.found) - 1)

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.found[self.open.pop()][0] == tag

    def handle_data(self, data):
        for index in self.open:
            self.texts[index] += data

    def all(self, tag):
        return [index for index, (name, *_) in enumerate(self.found) if name == tag]

    def inside(self, outer, tag):
        return [index for index in self.all(tag) if outer in self.found[index][2]]

    def rows(self, caption):
        """Return the cells of each row of the table with a caption."""
        (index,) = (one for one in self.all("caption") if self.texts[one] == caption)
        table = next(one for one in reversed(self.found[index][2]) if self.found[one][0] == "table")
        cells = (self.inside(row, "th") + self.inside(row, "td") for row in self.inside(table, "tr"))
        return [[self.texts[each] for each in sorted(row)] for row in cells]


@pytest.mark.parametrize(
    "results",
    [
        {"loss": [1.0]},
        {"loss": [1.0, 1.0]},
        {"loss": [1e-9, 1e9, 0.0]},
        {"loss": [math.nan, math.inf]},
        {"loss": [-1.0, 2.0], "val_loss": [math.nan, 3.0]},
        {"recall": [[0.5, 0.6], [0.5, 0.7]], "loss": [5, 4]},
        {"loss": [1e-30, 1.0]},
    ],
)
def test_any_results_make_a_page(results):
    text = page(record(**results))
    assert text.count("<svg") == text.count("</svg>") >= 1
    assert "a &amp; b" in text and "&lt;y&gt;" in text and "<w>" not in text and "a<b" not in text
    for svg in re.findall("<svg.*?</svg>", text):
        assert "nan" not in svg and "inf" not in svg
    outline = Outline(text)
    assert [row[0] for row in outline.rows("Results of each epoch")[1:]] == [
        str(number + 1) for number in range(len(next(iter(results.values()))))
    ]


def test_a_screen_reader_finds_titles_and_tables_behind_the_charts():
    outline = Outline(everything("n1"))
    assert outline.found[0][1] == {"lang": "en"} and len(outline.all("main")) == len(outline.all("h1")) == 1
    for table in outline.all("table"):
        caption, scopes = outline.inside(table, "caption"), outline.inside(table, "th")
        assert len(caption) == 1 and outline.texts[caption[0]]
        assert scopes and all(outline.found[index][1]["scope"] in ("row", "col") for index in scopes)
        assert all(outline.texts[index] for index in scopes), "a title has a text"
    for index in [*outline.all("svg"), *(i for i, one in enumerate(outline.found) if one[1].get("role") == "region")]:
        assert outline.found[index][1]["aria-label"]
    ids = [attrs["id"] for _, attrs, _ in outline.found if "id" in attrs]
    assert len(set(ids)) == len(ids)
    labels = [outline.found[index][1]["aria-label"] for index in outline.all("svg")]
    assert labels == [
        "loss: 1 in epoch 1, 3 in epoch 3; val_loss: 1 in epoch 1, 3 in epoch 3",
        "samples_per_second: 2 in epoch 1, 2 in epoch 3",
    ]
    head, *rows = outline.rows("Results of each epoch")
    assert head == ["epoch", "step", "loss", "val_loss", "seconds", "samples_per_second"]
    assert rows[1] == ["2", "1", "2", "–", "1", "2"], "a missing value"
    for index in outline.all("svg"):
        columns = outline.found[index][1]["data-columns"].split()
        assert [head[int(one)] for one in columns] in (["loss", "val_loss"], ["samples_per_second"])
    shares = outline.rows("Shares of time by rank")
    assert shares[0] == ["rank", "shares of time", "input", "compute", "communication", "waiting", "saving", "host"]
    assert shares[2] == ["1", "", "10.0%", "50.0%", "10.0%", "20.0%", "0.0%", "n1"]
    assert outline.rows("Hosts")[1] == ["n1", "0-1", "n1, cpu:0", "2", "8.0 GB", "200 MB (rank 1)"]


def test_names_are_text_wherever_they_are():
    """The page of hostile names has the elements and attributes of one of harmless names."""
    fair, foul = Outline(everything("fair")), Outline(everything(HOSTILE, HOSTILE))
    named = [[(tag, sorted(attrs)) for tag, attrs, _ in one.found] for one in (fair, foul)]
    assert named[0] == named[1]
    assert sum(HOSTILE in text for text in foul.texts) > 12
    assert [attrs["href"] for _, attrs, _ in foul.found if "href" in attrs] == [
        f"./{urllib.parse.quote(HOSTILE)}", "./trace.json.gz",
    ]  # fmt: skip


def test_a_page_needs_nothing_beside_it():
    text = everything("n1")
    assert not re.search(r"https?:|//|src=|@import|url\(", text.replace("</", ""))
    assert [attrs["href"][:2] for _, attrs, _ in Outline(text).found if "href" in attrs] == ["./", "./"]


def test_text_and_colours_have_contrast_in_both_themes():
    """Of WCAG 2.2: 4.5 for text (1.4.3), 3 for graphics (1.4.11)."""

    def light(colour):
        digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    style = document("", []).partition("<style>")[2].partition("</style>")[0]
    first = dict(re.findall(r"--(\w+): #(\w+)", style.partition("@media")[0]))
    second = {**first, **dict(re.findall(r"--(\w+): #(\w+)", style.partition("@media")[2]))}
    assert first["back"] != second["back"] and len(first) == 11
    for theme in (first, second):
        for name, colour in theme.items():
            dark, bright = sorted((light(colour), light(theme["back"])))
            least = 4.5 if name in ("text", "soft", "link", "green", "red", "olive") else 3
            assert name in ("back", "line") or (bright + 0.05) / (dark + 0.05) >= least, (name, colour)


@pytest.mark.parametrize("hosts", [1, 500])
def test_of_very_many_ranks_those_are_shown_for_whom_others_waited(hosts):
    ranks = [times(i, f"n{i % hosts}", last=int(i == 499), cost=float(i == 499)) for i in range(500)]
    places = [RankPlace(f"n{i % hosts}", ("cpu:0",), 2, None, "") for i in range(500)]
    outline = Outline(text := page(RunRecord("many", ranks=ranks, places=places, memory=[*range(499), 10**9])))
    assert "436 more ranks are not shown" in text and len(text) < 100_000
    shares, found = outline.rows("Shares of time by rank")[1:], outline.rows("Hosts")[1:]
    assert len(shares) == 64 and shares[-1][0] == "499"
    assert ("436 more hosts are not shown" in text) == (hosts == 500)
    last = ["n0", "0-499"] if hosts == 1 else ["n499", "499"]
    assert found[-1] == [*last, "cpu:0", "2", "–", "1.0 GB (rank 499)"] and len(found) == min(hosts, 64)


def test_one_rank_has_no_stragglers_and_unknown_memory_is_left_open():
    places = [RankPlace("n0", ("cpu:0",), 2, None, "")]
    text = page(RunRecord("one", ranks=[times(0)], places=places, memory=[None]))
    assert "late to a collective" not in text and "Stragglers" not in text
    assert Outline(text).rows("Hosts")[1][-2:] == ["–", "–"]
    assert Outline(page(RunRecord("none"))).texts[0].count("runs") == 1, "before the first epoch"


@pytest.mark.parametrize("name", ["javascript:alert(1)", "a b%41<c>\"'#?.txt", "\udcff\udcfe", "größe"])
def test_links_lead_to_files_of_any_name(tmp_path, name):
    for other in (name, "run.html", ".hidden", "trace.json.gz"):
        (tmp_path / other).touch()
    (tmp_path / "tensorboard").mkdir()
    log = tmp_path.parent / "logs" / name
    files = files_of(tmp_path, [RankPlace("n", (), 1, None, path) for path in (str(log), "", str(log), str(log))])
    assert {path for path, _ in files} == {name, "trace.json.gz", "tensorboard/", f"../logs/{name}"}
    assert dict(files)[f"../logs/{name}"] == "output of ranks 0, 2-3" and "perfetto" in dict(files)["trace.json.gz"]
    text = page(RunRecord("run", files=files)).encode(errors="backslashreplace").decode()
    (link,) = {attrs["href"] for _, attrs, _ in Outline(text).found if name[:1] == urllib.parse.unquote(
        attrs.get("href", "./-"), errors="surrogateescape")[2]}  # fmt: skip
    assert link.startswith("./") and (tmp_path / urllib.parse.unquote(link, errors="surrogateescape")).is_file()


def test_the_commit_of_the_program(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(machine.sys, "argv", [str(tmp_path / "train.py")])
    (tmp_path / "train.py").touch()
    assert machine.commit() == ""

    def git(*words):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", "-C", tmp_path, *settings, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("tag", "-m", "one", "v1")
    assert machine.commit() == git("rev-parse", "HEAD")
    (tmp_path / "train.py").write_text("changed")
    assert machine.commit() == f"{git('rev-parse', 'HEAD')}-dirty"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine.sys, "argv", [""])
    assert machine.commit().endswith("-dirty"), "a shell in the folder"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.commit() == "", "without git"


def test_peak_memory_grows_by_what_a_program_uses():
    before = machine.peak_memory()
    if before is None:
        pytest.skip("the system has no /proc")
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert machine.peak_memory() >= (64 << 20) and machine.peak_memory() >= before


_EVENTS = """<script>
const chart = document.querySelector("svg[data-columns]"), tip = chart.parentNode.querySelector(".tip"), said = [];
const box = chart.getBoundingClientRect(), ratio = box.width / 420;
const move = x => { chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + ratio * x})); note(); };
const press = key => { chart.dispatchEvent(new KeyboardEvent("keydown", {key})); note(); };
const note = () => said.push([tip.hidden, tip.textContent, chart.getAttribute("aria-valuetext")]);
note(); move(56); move(408); move(56 + 352 * .74); move(56 + 352 * .76);
chart.dispatchEvent(new PointerEvent("pointerleave")); note();
["Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Escape"].forEach(press);
const about = ["role", "tabindex", "aria-valuemin", "aria-valuemax"].map(name => chart.getAttribute(name));
document.title = JSON.stringify([about, said]);
</script>"""


def test_a_browser_shows_values_under_the_pointer_and_by_keys(tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium")
    file = tmp_path / "run.html"
    file.write_text(everything("n1", "a & <b>").replace("</main>", f"</main>{_EVENTS}"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=60)
    title = Outline(done.stdout)
    about, said = json.loads(title.texts[title.all("title")[0]])
    values = [f"epoch {number}: a & <b> {number}, val_a & <b> {other}" for number, other in ((1, 1), (2, "–"), (3, 3))]
    assert about == ["slider", "0", "1", "3"]
    assert said[0] == [True, "", values[2]]
    assert [one[1] for one in said[1:5]] == [values[0], values[2], values[1], values[2]]
    assert [one[0] for one in said] == [True, *4 * [False], True, *6 * [False], True]
    assert [one[1] for one in said[6:12]] == [values[index] for index in (0, 1, 2, 1, 2, 2)]
    assert all(one[1] == one[2] for one in said[1:])
