"""The benchmark's own code, on figures that are made up: turns, refusals, tables, plots, the docs' tables."""

from __future__ import annotations

import gc
import json
import random
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import instructions, machine, plots, report
from bench.compare import Case, compare, spread
from bench.machine import BusyError, Machine, Others
from bench.report import Column
from bench.start import import_table
from bench.workload import Workload, batches_of_values, make_values, shares

MACHINE = Machine("Some CPU", 2, 8.0, "6.1", "3.11.7", {"msgspec": "0.23"})


class Watch:
    """A machine on which others use these cores, run after run; the last figure stays."""

    def __init__(self, *cores: float) -> None:
        self._cores = list(cores) or [0.0]

    def wait_until_quiet(self) -> None: ...

    def begin(self) -> None: ...

    def cores(self) -> float:
        return self._cores.pop(0) if len(self._cores) > 1 else self._cores[0]

    def busy(self, cores: float) -> bool:
        return cores > 0.15


@pytest.fixture
def case() -> Case:
    runs = {
        "archiver": [{"rate": 500_000.0, "secs": 4.0}, {"rate": 520_000.0, "secs": 3.8}],
        "kcat": [{"rate": 400_000.0}, {"rate": 300_000.0}],
    }
    return Case("400 B", {"size": 400}, runs, 0.02)


def entry(*cases: Case, quick: bool = False, forced: bool = False) -> dict[str, object]:
    return report.part_result("A title.", cases, MACHINE, quick=quick, forced=forced)


# --- comparing --------------------------------------------------------------------------------


def test_sides_take_turns_and_the_order_turns_round() -> None:
    order: list[str] = []

    def side(name: str) -> dict[str, float]:
        order.append(name)
        return {"rate": float(len(order))}

    case = compare("x", {"a": lambda: side("a"), "b": lambda: side("b")}, Watch(), rounds=3)
    assert "".join(order) == "abbaab"
    assert [run["rate"] for run in case.runs["a"]] == [1.0, 4.0, 5.0]


def test_a_run_that_others_disturb_is_taken_again() -> None:
    results = iter([1.0, 2.0])
    case = compare("x", {"a": lambda: {"rate": next(results)}}, Watch(0.5, 0.1), rounds=1)
    assert case.runs["a"] == [{"rate": 2.0}]
    assert case.others_cores == 0.1  # of the run that counts


def test_a_busy_machine_gets_no_result() -> None:
    with pytest.raises(BusyError, match="FORCE=1"):
        compare("x", {"a": lambda: {"rate": 1.0}}, Watch(0.5), rounds=1)


def test_others_are_waited_for_and_then_refused_unless_forced() -> None:
    with pytest.raises(BusyError, match="others use"):
        Others(max_cores=-1.0).wait_until_quiet(timeout_secs=0.0)
    Others(force=True, max_cores=-1.0).wait_until_quiet(timeout_secs=0.0)


def test_our_own_work_is_counted_as_ours() -> None:
    before = machine._usage()
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        pass
    after = machine._usage()
    assert after.ours - before.ours >= 0.25
    assert after.everybody - before.everybody >= 0.25


def test_the_median_and_the_range_of_repeats() -> None:
    found = spread([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high, found.relative) == (2.0, 1.0, 3.0, 1.0)


# --- the workload -------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_records_of_about_the_size() -> None:
    work = Workload(records=500, size=400)
    values = make_values(work, random.Random(1), 500)
    assert values == make_values(work, random.Random(1), 500)
    assert all(380 <= len(value) <= 400 for value in values)
    assert not any(b"\n" in value for value in values)


def test_every_organisation_gets_a_record_and_zipf_favours_a_few() -> None:
    uniform = Counter(Workload(orgs=50).org_ids(random.Random(1), 500))
    assert set(uniform.values()) == {10}
    favoured = Counter(Workload(orgs=50, zipf=True).org_ids(random.Random(1), 5_000))
    assert favoured["org-000000"] > 20 * favoured["org-000049"]


@pytest.mark.parametrize("records", [1, 999, 20_001, 250_000])
def test_a_workload_has_exactly_its_records(records: int) -> None:
    work = Workload(records=records, size=100)
    assert sum(map(len, batches_of_values(work))) == records


def test_a_partition_gets_the_whole_pool_before_anything_comes_again() -> None:
    work = Workload(records=310_000, size=1_000, partitions=6)
    held: list[bytes] = []
    for turn, values in enumerate(batches_of_values(work)):
        parts = shares(work, values, turn)
        assert sorted(value for part in parts for value in part) == sorted(values)
        held += parts[2]
    assert len(set(held)) == work.distinct


# --- results and tables ---------------------------------------------------------------------------


def test_results_survive_the_file(tmp_path: Path, case: Case) -> None:
    path = tmp_path / "out" / "results.json"
    results = report.load(path)
    results["parts"]["headline"] = entry(case)
    report.save(path, results)
    part = report.load(path)["parts"]["headline"]
    assert part["machine"]["cpu"] == "Some CPU"
    assert part["cases"][0]["median"]["archiver"] == {"rate": 510_000.0, "secs": 3.9}
    assert report.cases_of(part) == [case]


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"format": 0, "parts": {}}')
    with pytest.raises(ValueError, match="format 0"):
        report.load(tmp_path / "results.json")


def test_a_table_shows_median_and_range_and_a_dash_for_what_is_missing(case: Case) -> None:
    columns = (Column("rate", "records/s", spread=True), Column("secs", "s", 1))
    table = report.rows([case], columns)
    assert table == [
        ["case", "side", "records/s", "s"],
        ["400 B", "archiver", "510,000 (500,000–520,000)", "3.9"],
        ["400 B", "kcat", "350,000 (300,000–400,000)", "–"],
    ]
    assert report.text_table(table).splitlines()[2].endswith("–")
    assert report.markdown_table(table).splitlines()[1] == "| --- | --- | ---: | ---: |"


def test_forced_and_quick_results_say_so(case: Case) -> None:
    assert "FORCED" in report.caption(entry(case, forced=True))
    assert "QUICK" in report.caption(entry(case, quick=True))
    assert "FORCED" not in report.caption(entry(case))


def test_forced_results_are_not_published(tmp_path: Path, case: Case) -> None:
    results = {"format": 1, "parts": {"headline": entry(case, forced=True)}}
    report.save(tmp_path / "results.json", results)
    assert command.publish(tmp_path / "results.json", tmp_path / "docs", force=False) == 1
    assert not (tmp_path / "docs").exists()


def test_publishing_writes_data_plots_and_the_tables_of_the_page(tmp_path: Path, case: Case) -> None:
    for side in case.runs.values():
        for run in side:
            run |= {column.figure: 1.0 for column in report.END_TO_END if column.figure not in run}
    report.save(tmp_path / "results.json", {"format": 1, "parts": {"headline": entry(case)}})
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text(
        "Before\n<!-- bench: headline -->\nold\n<!-- end -->\n<!-- bench: sizes -->\n<!-- end -->\n"
    )
    for _ in range(2):  # the second time changes nothing
        assert command.publish(tmp_path / "results.json", tmp_path / "docs", force=False) == 0
        text = page.read_text()
        assert "510,000 (500,000–520,000)" in text
        assert "old" not in text
        assert text.count("<!-- end -->") == 2
        assert "Not measured yet." in text
    assert ET.fromstring((tmp_path / "docs/performance/headline.svg").read_text()).tag.endswith("svg")


def test_the_tables_of_the_docs_are_those_of_the_data_beside_them() -> None:
    page = command.DOCS / "performance.md"
    results = report.load(command.DOCS / "performance" / "results.json")
    assert report.fill(page.read_text(), results, command.COLUMNS) == page.read_text()
    for name, svg in plots.plots(results).items():
        assert (command.DOCS / "performance" / name).read_text() == svg


def test_every_part_says_what_it_measures_and_is_in_the_docs() -> None:
    page = (command.DOCS / "performance.md").read_text()
    for name, part in command.PARTS.items():
        assert part.title.endswith("."), name
        assert f"<!-- bench: {name} -->" in page


# --- plots ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [False, True])
def test_a_line_chart_has_a_line_per_series_within_its_frame(log: bool) -> None:
    series = {"a & b": [(10.0, 5.0), (1_000.0, 90.0)], "c": [(10.0, 1.0), (1_000.0, 2.0)]}
    svg = plots.line_chart("T <1>", series, "x", "y", log_x=log, log_y=log, limits={"limit": 95.0})
    root = ET.fromstring(svg)
    lines = [e.attrib["points"] for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 2
    places = [tuple(map(float, place.split(","))) for line in lines for place in line.split()]
    assert all(0 <= x <= plots.WIDTH and 0 <= y <= plots.HEIGHT for x, y in places)
    assert places[0][1] > places[1][1]  # more is higher up
    assert "a & b" in [e.text for e in root.iter()]


def test_a_bar_is_as_high_as_its_figure() -> None:
    root = ET.fromstring(plots.bar_chart("T", {"a": (50.0, 40.0, 60.0), "b": (100.0, 90.0, 100.0)}, "y"))
    heights = [float(e.attrib["height"]) for e in root.iter() if e.tag.endswith("rect") and "x" in e.attrib]
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.01)


def test_every_plot_is_drawn_from_its_part() -> None:
    runs = {
        "archiver": [{"rate": 1.0, "secs": 2.0, "mb_per_sec": 3.0, "peak_mb": 4.0, "bytes_per_record": 0.5}]
    }
    params = {"size": 1, "orgs": 1, "zipf": False, "records": 1, "destinations": 1, "target_peak_mb": 400}
    cases = [Case("one", params, runs), Case("two", {**params, "zipf": True, "size": 9}, runs)]
    results = {"format": 1, "parts": {part: entry(*cases) for part in command.PARTS}}
    drawn = plots.plots(results)
    assert len(drawn) == 6
    for svg in drawn.values():
        ET.fromstring(svg)


def test_ticks_are_round_and_enclose_the_values() -> None:
    assert plots.nice_steps(0.0, 9.7) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert plots.short(1_500_000) == "1.5M"


# --- imports and instructions --------------------------------------------------------------------------


def test_import_times_add_up_per_package() -> None:
    text = (
        "import time: self [us] | cumulative | imported package\n"
        "import time:      1500 |       1500 |   rich.text\n"
        "import time:       500 |       2000 | rich\n"
        "import time:       250 |        250 | archiver\n"
    )
    assert import_table(text) == {"rich": 2.0, "archiver": 0.25}


def test_more_instructions_than_the_baseline_allows_fail() -> None:
    baseline = {"versions": instructions.versions(), "instructions": {"a": 1_000.0}}
    assert instructions.compare({"a": 1_029.0}, baseline)[1]
    lines, fine = instructions.compare({"a": 1_050.0}, baseline)
    assert not fine
    assert "MORE than 3%" in lines[0]
    assert not instructions.compare({"new": 1.0}, baseline)[1]


def test_a_baseline_of_other_versions_allows_more_and_says_so() -> None:
    baseline = {"versions": {"python": "2.7"}, "instructions": {"a": 1_000.0}}
    lines, fine = instructions.compare({"a": 1_100.0}, baseline)
    assert fine
    assert "2.7" in lines[0]


def test_every_part_that_is_counted_has_a_baseline_and_runs() -> None:
    baseline = json.loads(instructions.BASELINE.read_text())
    assert set(baseline["instructions"]) == set(instructions.WORKLOADS)
    for name in instructions.WORKLOADS:
        instructions.run_part(name, 1_000)
    gc.enable()
