"""The page: complete, escaped, and in need of nothing beside it."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hush.report.run.charts import charts
from hush.report.run.collect import run_facts
from hush.report.run.facts import AuditFacts, RunFacts
from hush.report.run.page import render, report_json, write_report
from tests.report.run.chromium import CHROMIUM, Browser
from tests.report.run.conftest import TRAINING, charge


class Page(HTMLParser):
    """Elements of a page, and the text of those with an id or a class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.elements.append((tag, found))
        if tag not in ("meta", "link"):
            self._open.append((tag, found.get("id") or ""))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag, "every element is closed in its turn"

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            self.texts[name] = self.texts.get(name, "") + data


SECTIONS = ("guarantee", "protected", "attacks", "curves", "spent", "caveats", "audit", "model-card")


def test_everything_is_said_and_the_facts_are_in_the_page(facts: RunFacts) -> None:
    page, plain = Page(render(facts)), report_json(facts)
    assert json.loads(page.texts["facts"]) == json.loads(json.dumps(plain))
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert {*SECTIONS, "how-to-dp-fy-ml", "nist"} <= ids
    said = plain["statements"]
    for text in (said["for_lawyers"], said["for_engineers"]):
        assert text in page.texts["guarantee"]
    for item in (*said["protection"], *said["caveats"]):
        assert item["text"] in "".join(page.texts.values())
    assert page.texts["card"] == said["model_card"]
    assert f"{facts.guarantee.delta:g}" in page.texts["guarantee"]


def test_an_audit_is_proposed_where_there_is_one(facts: RunFacts) -> None:
    trained = replace(facts, kind="training", settings={"data": "digits"})
    assert "hush audit RUN_DIR --json" in Page(render(trained)).texts["audit"]
    for other in (facts, replace(trained, kind="PATE"), replace(trained, settings={})):
        assert "RUN_DIR" not in Page(render(other)).texts["audit"]
    found = AuditFacts(
        lower_bound=0.4375,
        confidence=0.95,
        charge=2.5,
        exceeded=False,
        kind="gradient",
        canaries=256,
        runs=1,
        steps=30,
    )
    page = Page(render(replace(trained, audit=found)))
    assert "Epsilon is at least 0.4375 with confidence 0.95" in page.texts["audit"]
    assert "Do not publish" in "".join(page.texts.values())
    refuted = render(replace(trained, audit=replace(found, exceeded=True)))
    assert "THE BOUND IS ABOVE THE CHARGE" in refuted


def test_a_chart_says_what_it_reads_before_the_cursor_moves(facts: RunFacts) -> None:
    page = Page(render(facts))
    for name, chart in charts(facts).items():
        assert chart.readings[chart.start].text in page.texts[name]
        assert chart.how in page.texts[name]
    sliders = [found for tag, found in page.elements if tag == "svg" and found.get("role") == "slider"]
    assert [found["tabindex"] for found in sliders] == ["0"] * len(charts(facts))


def test_nothing_is_fetched(facts: RunFacts) -> None:
    text = render(facts)
    page = Page(text)
    for _, found in page.elements:
        for name in ("src", "href", "action", "data", "srcset"):
            assert (found.get(name) or "data:,") == "data:,"
    policies = [found["content"] for _, found in page.elements if found.get("http-equiv")]
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'")
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket", text)


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&"


def test_strings_of_a_run_are_text(facts: RunFacts) -> None:
    hostile = replace(
        facts,
        name=HOSTILE,
        settings={HOSTILE: HOSTILE, "features": HOSTILE, "public_records": 3},
        tuned={"settings": {HOSTILE: HOSTILE}, "score": HOSTILE},
        notes=(HOSTILE,),
        metrics=({"step": 1, "epsilon": 1.0, "accuracy": 0.5, HOSTILE: HOSTILE},),
    )
    plain, page = Page(render(facts)), Page(render(hostile))
    for tag in ("script", "img", "style"):
        assert sum(each == tag for each, _ in page.elements) == sum(e == tag for e, _ in plain.elements)
    assert not any("onerror" in found for _, found in page.elements)
    assert json.loads(page.texts["facts"])["name"] == HOSTILE
    assert HOSTILE in page.texts["settings"]


def test_a_seeded_run_on_too_few_records_says_so(tmp_path: Path) -> None:
    path = charge(tmp_path / "ledger.jsonl", (TRAINING, 1), seeded=True)
    facts = run_facts(path, delta=1e-2)
    caveats = {item["term"]: item for item in report_json(facts)["statements"]["caveats"]}
    assert caveats["Randomness"]["state"] == "attention"
    assert "nobody knows the seed" in caveats["Randomness"]["text"]
    assert caveats["Delta"]["state"] == "attention"
    assert "seeded" in report_json(facts)["statements"]["for_engineers"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_a_browser_reads_the_curves(browser: Browser, facts: RunFacts, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", facts)
    for width in (400, 1400):
        browser.open(tmp_path / "report.html", width=width, dark=width == 400)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing is cut off"
    for name, chart in charts(facts).items():
        browser.evaluate(f"document.getElementById('{name}').scrollIntoView()")
        box = browser.evaluate(
            f"(({{x, y, width, height}}) => [x, y, width, height])"
            f"(document.querySelector('#{name} svg').getBoundingClientRect())"
        )
        seen = set()
        for share in (0.2, 0.5, 0.8):
            browser.point_at(box[0] + share * box[2], box[1] + box[3] / 2)
            seen.add(browser.evaluate(f"document.querySelector('#{name} output').textContent"))
        assert len(seen) == 3, name
        assert seen <= {reading.text for reading in chart.readings}
        browser.evaluate(f"document.querySelector('#{name} svg').focus()")
        browser.press("Home")
        browser.press("ArrowRight")
        shown = browser.evaluate(f"document.querySelector('#{name} output').textContent")
        assert shown == chart.readings[1].text
    browser.evaluate("document.querySelector('#guarantee summary').click()")
    assert browser.evaluate("document.querySelector('#guarantee').open") is False
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert browser.evaluate("[...document.querySelectorAll('details')].every(d => d.open)")
    browser.evaluate("document.querySelector('button[data-copy]').click()")
    browser.evaluate("new Promise(resolve => setTimeout(resolve, 50))")
    assert browser.evaluate("document.querySelector('.copied').textContent") != ""
    assert {url.partition(":")[0] for url in browser.requests} <= {"file", "about", "data"}
    assert browser.complaints == []
