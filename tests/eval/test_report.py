"""Figures of hand-made runs, and the pages that show them."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from eval.report import read_report, write_report
from eval.report_html import page
from eval.report_sections import sections
from eval.report_text import markdown, render_report
from tests.eval import hand_made

COUNTED = {"drafted", "accepted", "steps", "tokens", "decode_seconds", "prefill_seconds"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report on disk, with all its pictures."""
    folder = tmp_path_factory.mktemp("report")
    report = hand_made.report()
    report["methods"]["strong"]["draft_cache"] = {
        "bytes_per_token": 2048, "window_bytes_per_token": 1024, "window_bytes": 1024 * 2047,
        "target_bytes_per_token": 8192,
    }  # fmt: skip
    write_report(report, folder)
    return folder


def test_figures_of_one_prompt_by_hand():
    # Steps emit 4, 3, 1 tokens: 8 / 3. Plain takes 8 x 10 ms, the steps 3 x 21 ms.
    report = hand_made.report([hand_made.response("p", {"m": [3, 2, 0]})])
    method = report["methods"]["m"]
    overall = method["overall"]
    assert overall["acceptance_length"]["value"] == pytest.approx(8 / 3)
    assert overall["accepted_share"]["value"] == pytest.approx(5 / 9)
    assert overall["speed_up"]["value"] == pytest.approx(80 / 63)
    assert overall["speed_up_end_to_end"]["value"] == pytest.approx((80 + 100) / (63 + 200))
    assert [p["acceptance"]["value"] for p in method["positions"]] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert [p["conditional"]["value"] for p in method["positions"]] == pytest.approx([2 / 3, 1.0, 1 / 2])
    assert method["time"]["prefill"]["value"] == pytest.approx(0.2)
    assert report["plain"]["prefill"]["value"] == pytest.approx(0.1)
    assert overall["acceptance_length"]["low"] is None  # one prompt has no interval
    assert overall["claim"]["text"] == "not shown"


def test_context_figures_by_hand():
    context = hand_made.report([hand_made.response("p", {"m": [3, 2, 0]})])["methods"]["m"]["contexts"][
        "0-2K"
    ]
    assert context["break_even"]["value"] == pytest.approx(20 / 10)  # draft 5 and verify 15 ms, plain 10 ms
    assert context["speed_up"]["value"] == pytest.approx(10 / (63 / 8))
    assert {part: figure["value"] for part, figure in context["time"].items()} == pytest.approx(
        {"draft": 0.005, "verify": 0.015, "other": 0.001, "plain": 0.010}
    )
    predicted = {p["acceptance_length"]: p["value"] for p in context["predicted_speed_up"]}
    assert predicted == pytest.approx({1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0})


def test_prediction_at_the_measured_acceptance_length_is_the_measured_speed_up_but_for_other_time():
    for figures in hand_made.report()["methods"]["strong"]["contexts"].values():
        predicted = figures["acceptance_length"]["value"] / figures["break_even"]["value"]
        assert predicted == pytest.approx(figures["speed_up"]["value"] * 21 / 20)


def test_mean_of_means_stands_under_its_own_name_and_differs_from_the_pooled_length():
    responses = [hand_made.response("short", {"m": [3]}), hand_made.response("long", {"m": [0] * 99})]
    overall = hand_made.report(responses)["methods"]["m"]["overall"]
    assert overall["acceptance_length"]["value"] == pytest.approx(103 / 100)
    assert overall["mean_of_prompt_means"]["value"] == pytest.approx(2.5)
    assert "prompts" in overall["mean_of_prompt_means"]["formula"]


def test_steps_are_sorted_into_the_buckets_that_are_asked_for():
    responses = [hand_made.response("p", {"m": [3, 3, 3]}, context=2045)]
    default = hand_made.report(responses)["methods"]["m"]["contexts"]
    assert {b: c["acceptance_length"]["denominator"] for b, c in default.items()} == {"0-2K": 1, "2-8K": 2}
    own = hand_made.report(responses, edges=(2000, 4096))["methods"]["m"]["contexts"]
    assert list(own) == ["2000-4K"]


def test_every_figure_carries_its_interval_count_and_formula():
    report = hand_made.report()
    found = []

    def walk(value, path):
        if isinstance(value, dict):
            if "low" in value:
                found.append(path)
                middle = value.get("value", value.get("difference"))
                assert value["low"] - 1e-9 <= middle <= value["high"] + 1e-9, path
                assert value["n"] > 0, path
                return
            for key, inner in value.items():
                walk(inner, (*path, key))
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                walk(inner, (*path, i))
        elif isinstance(value, float):
            # What is no figure: where a bucket lies, repeats (their spread is beside them), a bound, counts.
            allowed = {"mean_context", "tie_bound", "median", "q1", "q3", "iqr"}
            assert path[-1] in allowed, f"{path} is a figure without an interval"

    walk({key: report[key] for key in ("plain", "methods", "comparisons")}, ())
    assert len(found) > 100


def test_two_drafters_are_compared_prompt_by_prompt():
    (pair,) = hand_made.report()["comparisons"]
    assert (pair["first"], pair["second"]) == ("weak", "strong")
    length = pair["acceptance_length"]
    assert length["difference"] < 0
    assert length["high"] < 0
    assert (length["n"], length["first_higher"], length["second_higher"]) == (24, 0, 24)
    assert length["p_value"] < 0.001
    assert length["claim"] == {"shown": True, "text": "lower", "prompts_needed": None}
    assert set(pair["data_sets"]) == {"code", "chat"}
    assert pair["data_sets"]["code"]["speed_up"]["n"] == 12
    assert pair["data_sets"]["code"]["acceptance_length"]["claim"]["text"] == "lower?"


def test_p_values_of_several_pairs_are_adjusted():
    responses = [
        hand_made.response(f"p{i}", {"a": [3, 3], "b": [1, 1, 1, 1], "c": [0] * 8}) for i in range(4)
    ]
    report = hand_made.report(responses)
    for pair in report["comparisons"]:
        # Four equal prompts: of 16 swaps two give the observed distance, and there are three pairs.
        assert pair["acceptance_length"]["p_value"] == pytest.approx(2 / 16)
        assert pair["acceptance_length"]["p_value_adjusted"] == pytest.approx(6 / 16)


def test_warnings_name_failures_first_then_what_n_cannot_support():
    different = {"m": hand_made.difference(near_tie=False)}
    tie = {"m": hand_made.difference(near_tie=True)}
    responses = [
        hand_made.response("a", {"m": [0, 0]}, differences=different),
        hand_made.response("b", {"m": [0, 0]}, differences=tie),
        hand_made.response("c", {"m": [0, 1]}),
    ]
    report = hand_made.report(responses)
    lossless = report["methods"]["m"]["lossless"]
    assert (lossless["checked"], lossless["equal"], lossless["near_ties"], lossless["failures"]) == (
        3,
        1,
        1,
        1,
    )
    assert "1 of 3 greedy responses differ" in report["warnings"][0]
    assert "fewer than 20" in report["warnings"][1]
    assert any("at context 0-2K (1.17 below 2.00)" in warning for warning in report["warnings"])
    text = markdown(report, [])
    assert text.index("| m | a | 1 | 3 | 1.50000 | DIFFERS |") < text.index("near tie |")


def test_speed_up_that_is_not_shown_says_how_many_prompts_would_show_it():
    fast, slow = {"m": [3, 3, 3, 3]}, {"m": [0, 1, 0, 1, 0, 1, 0, 1, 1, 1]}
    responses = [hand_made.response(f"p{i}", fast if i % 4 == 0 else slow) for i in range(24)]
    report = hand_made.report(responses)
    claim = report["methods"]["m"]["overall"]["claim"]
    assert claim["text"] == "not shown"
    assert any(f"about {claim['prompts_needed']} prompts would show" in w for w in report["warnings"])


def test_report_of_an_older_schema_is_not_taken_for_a_finished_one(tmp_path):
    (tmp_path / "report.json").write_text('{"schema_version": 1}')
    assert read_report(tmp_path) is None
    assert read_report(tmp_path / "nowhere") is None


def test_files_are_written_and_hold_no_number_that_json_has_no_word_for(written):
    names = {path.name for path in written.iterdir()}
    pictures = {
        "acceptance_by_position",
        "acceptance_by_context",
        "predicted_speed_up",
        "speed_up",
        "time_split",
    }
    assert names == {"report.json", "report.md", "report.html", *(f"{name}.png" for name in pictures)}
    text = (written / "report.md").read_text()
    for name in pictures:
        assert f"({name}.png)" in text
        assert (written / f"{name}.png").stat().st_size > 5_000

    def refuse(constant):
        raise AssertionError(constant)

    report = json.loads((written / "report.json").read_text(), parse_constant=refuse)
    assert render_report(report)


VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """Checks that every tag is closed where it should be; keeps attributes and the text of cells."""

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.cells, self.ids = [], [], [], []
        self.tags = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "td":
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.cells[-1] += data


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_page_is_well_formed_and_loads_nothing_from_outside(written):
    text = (written / "report.html").read_text()
    reader = read(text)
    assert not reader.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    for tag, name, value in reader.attributes:
        if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            assert value.startswith("#"), f"<{tag} {name}={value}>"
        assert "url(" not in value or "url(#" in value
    assert not re.search(r"@import|url\((?!#)", text)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert len([tag for tag, name, _ in reader.attributes if (tag, name) == ("svg", "viewbox")]) == 5


def test_pictures_on_the_page_take_its_colours_and_do_not_share_ids(written):
    text = (written / "report.html").read_text()
    body = text[text.index("<body>") :]
    assert "#1b2330" not in body
    assert "currentColor" in body
    assert {"var(--c0)", "var(--c1)", "var(--font)"} <= set(re.findall(r"var\(--\w+\)", body))
    clips = re.findall(r'<clipPath id="([^"]+)"', body)
    assert len(clips) == len(set(clips)) >= 5


def leaves(value):
    if isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def test_all_numbers_of_the_tables_come_from_the_json(written):
    report = json.loads((written / "report.json").read_text())
    shown = set()
    for leaf in leaves(report):
        for scaled in (leaf, leaf * 1e3):
            shown |= {f"{abs(scaled):.{digits}f}" for digits in (0, 1, 2, 3)}
    cells = read((written / "report.html").read_text()).cells
    names = {"0-2K", "2-8K"}
    numbers = [n for cell in cells if cell not in names for n in re.findall(r"\d+(?:\.\d+)?", cell)]
    assert len(numbers) > 300
    lengths = [figures["mean_context"] for figures in report["methods"]["strong"]["contexts"].values()]
    cache = [f"{(n * 2048 + min(n, 2047) * 1024) / 2**20:.1f}" for n in lengths]
    strange = [n for n in numbers if n not in shown and n not in (*cache, "0.001")]
    assert strange == []


def test_page_and_markdown_say_the_same(written):
    report = json.loads((written / "report.json").read_text())
    text, cells = (written / "report.md").read_text(), read(page(report, [])).cells
    rows = [cell for section in sections(report) for row in section.rows for cell in row]
    assert cells == rows
    assert all(f"| {cell} |" in text for cell in rows)


def rates(value):
    return {"value": value, "low": value * 0.9, "high": value * 1.1, "n": 24}


def test_engine_figures_have_a_curve_and_two_tables(tmp_path):
    report = hand_made.report()
    names = ("speed_up", "speed_up_end_to_end", "acceptance_length")
    report["concurrency"] = [
        {
            "concurrency": level,
            "methods": {"plain": {"tokens_per_second": rates(100.0 * level)}}
            | {
                method: {"tokens_per_second": rates(150.0 * level), **{name: rates(1.5) for name in names}}
                for method in ("strong", "weak")
            },
        }
        for level in (1, 4)
    ]
    counters = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15, "acceptance_length": 2.5}
    report["engine"] = {"facts": {"vllm": "0.32.0"}, "logs": [], "jobs": 2, "counters": {"strong": counters}}
    write_report(report, tmp_path)
    assert (tmp_path / "concurrency.png").stat().st_size > 5_000
    text = (tmp_path / "report.md").read_text()
    assert "| 4 | strong | 600.0 [540.0, 660.0] | 1.50 [1.35, 1.65] |" in text
    assert "| 4 | plain | 400.0 [360.0, 440.0] | – |" in text
    assert "| strong | 10 | 30 | 15 | 2.50 | 3.60 [" in text
    assert "vllm 0.32.0" in text
    assert 'aria-label="Tokens a second by requests at once"' in (tmp_path / "report.html").read_text()


def test_names_from_outside_cannot_break_the_page():
    responses = [hand_made.response("<b>&", {"<script>x": [1, 0]}, dataset="a<b", category='"q"')] * 2
    text = page(hand_made.report(responses), [])
    assert "<script" not in text
    read(text)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Sizes that the page says itself: whether it is wider than the window, and which labels leave their picture.
PROBE = """<script>
const clipped = [];
for (const svg of document.querySelectorAll('figure svg')) {
  const frame = svg.getBoundingClientRect();
  for (const text of svg.querySelectorAll('text')) {
    const box = text.getBoundingClientRect();
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 ||
        box.bottom > frame.bottom + 1) clipped.push(text.textContent);
  }
}
const texts = [...document.querySelectorAll('figure svg text')];
const labels = texts.map(text => text.getBoundingClientRect().height);
document.body.dataset.probe = JSON.stringify({
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth, clipped,
  smallest: Math.min(...labels), figures: document.querySelectorAll('figure svg').length,
  background: getComputedStyle(document.body).backgroundColor,
});
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on this machine")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (360, True)], ids=["desk", "phone, dark"])
def test_page_in_a_real_browser(written, tmp_path, width, dark):
    # A browser window cannot be as narrow as a phone, a frame can.
    inner = tmp_path / "inner.html"
    inner.write_text((written / "report.html").read_text().replace("</body>", PROBE))
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<body style="margin:0"><iframe id="f" src="inner.html" width="{width}" height="900"></iframe>'
        '<script>const f = document.getElementById("f"); f.onload = () => '
        "{ document.body.dataset.found = f.contentDocument.body.dataset.probe; };</script></body>"
    )
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
         "--virtual-time-budget=10000", *scheme, "--dump-dom", outer.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stdout[:2000]
    probe = json.loads(found[1].replace("&quot;", '"'))
    assert probe["figures"] == 5
    assert probe["wide"] <= 0, "the page scrolls sideways"
    assert probe["clipped"] == []
    assert probe["smallest"] >= 11, "labels are too small to read"
    red = int(re.findall(r"\d+", probe["background"])[0])
    assert (red < 60) == dark
    assert math.isfinite(probe["smallest"])
