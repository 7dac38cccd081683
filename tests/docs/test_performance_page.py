"""The performance page, its topics and charts, and the figures in the README say what the result files say."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import chunks, common, names, performance_page, sglang, vllm
from benchmarks.page.pictures import performance

ROOT = Path(__file__).parents[2]
WRITTEN = performance_page.expected()
PAGES = [path for path in WRITTEN if path.suffix == ".md" and path != performance_page.README]


@pytest.mark.parametrize(("path", "text"), WRITTEN.items(), ids=lambda each: getattr(each, "name", ""))
def test_page_is_what_the_results_say(path: Path, text: str) -> None:
    assert path.read_text() == text, f"{path.name} is stale: run `python -m benchmarks.page.performance_page`"


def test_the_front_page_is_one_screen() -> None:
    assert len(performance_page.page().splitlines()) <= 120


def test_every_topic_is_written_linked_and_in_the_navigation() -> None:
    navigation, front = (ROOT / "mkdocs.yml").read_text(), performance_page.page()
    written = {path.stem for path in (ROOT / "docs" / "performance").glob("*.md")}
    assert written == {topic.name for topic in performance_page.topics()}
    for name in written:
        assert f"performance/{name}.md" in navigation and f"(performance/{name}.md)" in front


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_column_has_a_name(path: Path) -> None:
    lines = path.read_text().splitlines()
    heads = [line for line, below in pairwise(lines) if re.fullmatch(r"[|:-]+", below)]
    assert heads and all("" not in [cell.strip() for cell in head.strip("|").split("|")] for head in heads)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_is_there(path: Path) -> None:
    for module in re.findall(r"python -m ([a-z_.]+)", path.read_text()):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_nothing_is_told_of_how_a_run_went(path: Path) -> None:
    """That is the lab's."""
    found = re.findall(r"given back|ended before|did not come back|which computed them then", path.read_text())
    assert not found


def test_a_batch_without_a_plain_name_is_shown_as_it_is() -> None:
    assert names.use_of("64 x (8192 + 512)") == "64 questions on one long document"
    assert names.use_of("7 x (5)") == "7 x (5)"
    assert names.traffic("documents 6/s") == "questions on documents, 6 per second"
    assert names.tree("1,8,256_1024,3072,4096") == "256 requests: 1,024, 8 × 3,072 shared, 4,096 own"
    assert names.tree("1_8192") == "one request of 8,192 tokens"
    assert names.offline("32 × (2048 + 64), SmolLM2") == "32 requests: 2,048 shared, 64 own, SmolLM2"
    assert names.offline("32 × 256 unshared") == "32 requests of 256 tokens"
    with pytest.raises(ValueError, match="expected nodes and tokens"):
        names.tree("64 x (4096)")


def test_a_changed_result_changes_both_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    before = performance_page.page(), performance_page.readme()
    read = common.read

    def changed(path: Path) -> str:
        if path.stem != "vllm-tpot-h100":
            return read(path)
        result = json.loads(read(path))
        (row,) = (row for row in result["rows"] if row["workload"] == "256 x (1024 + 128)")
        row["CUSTOM"]["tpot_ms"] = 3.21
        return json.dumps(result)

    monkeypatch.setattr(common, "read", changed)
    after = performance_page.page(), performance_page.readme()
    assert all("| 3.2 |" in text or "**3.2**" in text for text in after)
    assert before[0] != after[0] and before[1] != after[1]
    assert "3.2  (" in performance.vllm().svg()


def test_every_loss_in_the_results_is_on_its_page() -> None:
    """The row of vLLM on two cards where nothing is shared is a loss today."""
    pair = common.load("vllm-tpot-h200-tp2")["rows"][-1]
    assert pair["CUSTOM"]["tpot_ms"] > pair["FLASH_ATTN"]["tpot_ms"]
    for topic in performance_page.topics():
        text, losses = performance_page.topic_page(topic), [each for made in topic.made() for each in made.losses]
        assert all(f"| {loss.where} | {loss.than} | {loss.by} |" in text for loss in losses)
        assert topic.name != "vllm" or any(loss.where == "vLLM 0.26.0, two H200s: nothing shared" for loss in losses)


def test_the_front_page_has_the_worst_losses_of_each_kind_first(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [common.Loss("a", "x", 1.2), common.Loss("b", "x", 1.9), common.Loss("c", "y", 1.04)]
    first = performance_page.Topic("first", "First", "", ())
    second = performance_page.Topic("second", "Second", "", ())
    more = [common.Loss("d", "x", 2.5, "from 0.90×")]
    found = [(first, [common.Section("", losses)]), (second, [common.Section("", more)])]
    assert performance_page.worst_losses(found) == [(second, more[0]), (first, losses[1])]


def test_the_front_page_shows_the_worst_loss_of_a_few_topics_and_folds_the_rest() -> None:
    topics = [performance_page.Topic(str(number), "", "", ()) for number in range(8)]
    worst = [(topic, common.Loss(f"case {topic.name}", "x", 9.0 - int(topic.name))) for topic in topics]
    worst.insert(1, (topics[0], common.Loss("another", "y", 8.5, "from 0.90×")))
    shown, _, folded = performance_page.loss_tables(worst).partition("<details")
    assert [line for line in shown.splitlines() if "x |" in line] == [
        f"| [case {number}](performance/{number}.md) | x | {9 - number}.00× |" for number in range(6)
    ]
    assert "<summary>3 more</summary>" in folded
    assert re.findall(r"^\| \[([^]]+)\]", folded, re.M) == ["another", "case 6", "case 7"]
    assert "| [another](performance/0.md) | y | 8.50× (from 0.90×) |" in folded
    assert "<details" not in performance_page.loss_tables(worst[:1])


def test_every_source_is_a_result_with_its_origin() -> None:
    for path in common.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert {"date", "commit", "device", "versions"} <= set(result), path.name


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of made-up results."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tmp_path


def test_versions_are_those_of_each_result(results: Path) -> None:
    for name, version in (("a", "0.33.0"), ("b", "0.26.0"), ("c", "0.26.0"), ("d", "0.26.0")):
        (results / f"{name}.json").write_text(json.dumps({"versions": {"vllm": version}}))
    assert common.versions_of("vllm", {"H200": "b", "two": "c"}) == "0.26.0"
    assert common.versions_of("vllm", {"H100": "a", "H200": "b"}) == "0.33.0 (H100) and 0.26.0 (H200)"
    several = {"H100": "a", "H200": "b", "two": "c", "four": "d"}
    assert common.versions_of("vllm", several) == "0.33.0 (H100) and 0.26.0 (H200, two and four)"


def test_a_part_of_a_result_has_its_own_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other parts may have been measured into the same file later."""
    read, sweep = common.read, common.load("hybrid-h100")["sweep"]
    later = {"date": "2099-01-01", "commit": "later"}
    monkeypatch.setattr(common, "read", lambda path: json.dumps(json.loads(read(path)) | later))
    text = chunks.hybrid().text
    assert f"`hybrid-h100.json`: {sweep['date']}" in text
    assert f"commit {sweep['commit']}\n" in text
    assert "2099" not in text and "later" not in text
    assert "2099-01-01" in chunks.prefill().text


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no pair of markers"):
        performance_page.between("# No markers", "figures")


def compared(equal: int, within: bool) -> dict[str, Any]:
    spread = {"mean": 0.01, "p99": 0.03125, "max": 0.0625}
    one = {"equal_tokens": equal, "of": 100, "parted": 1, "gaps": [0.0156], "logprob_difference": spread}
    return {"cold": one, "cached": one, "within_rounding": within}


@pytest.fixture
def results_of_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up results of all four scripts for SGLang, and one that is of no card."""
    origin = {"date": "2026-01-02", "commit": "abc", "device": "CPU", "versions": {"sglang": "0.5.17"}}
    origin |= {"card": "NVIDIA H100 80GB HBM3"}
    figures = {name: {"mean": 2.0, "median": 2.0, "p99": 4.0} for name in ("ttft", "tpot", "latency")}
    slower = {name: {part: 2 * value for part, value in each.items()} for name, each in figures.items()}
    control = compared(3, False)["cold"]
    row = {"first": "fa3@16", "control": control, "same_backend_cold_and_cached": control, "facts": []}
    files = {
        "sglang-tpot-h100": {
            "runs": {"fa3": {}, "fa3+trunk@16": {}},
            "rows": [
                {"workload": "64 x (8192 + 512)", "fa3": {"tpot_ms": 18.0}, "fa3+trunk@16": {"tpot_ms": 9.0}},
                {"workload": "32 x (2048)", "fa3": {"tpot_ms": 10.0}, "fa3+trunk@16": {"tpot_ms": 10.5}},
            ],
        },
        "sglang-serving-h100": {"runs": {"fa3": {"documents 6/s": figures}, "fa3+trunk@16": {"documents 6/s": slower}}},
        "sglang-equality-h100-tp2": {
            "rows": [
                {"case": "bf16", "trunk@16": compared(97, True), **row},
                {"case": "fp8", "trunk@16": compared(5, False), **row},
                {"case": "window", "failed": {"trunk@16": ["first line", "no memory"]}},
            ]
        },
        "sglang-steady-h100-trunk-16": {
            "backend": "trunk@16", "steps": 10_000, "waits": {"cudaEventSynchronize": 20}, "copies_to_host": {},
            "memory_mb": [700.0, 702.0],
        },
        "sglang-tpot-cpu": {"rows": "of no card"},
    }  # fmt: skip
    for name, result in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**origin, **result}))
    monkeypatch.setattr(common, "RESULTS", tmp_path)


@pytest.mark.usefixtures("results_of_sglang")
def test_sglang_has_a_section_for_each_result() -> None:
    made = [part() for part in sglang.sections()]
    text = "".join(section.text for section in made)
    assert len(made) == 4
    assert "| 18.0 | 9.0 | 2.00× |" in text and "| 10.0 | 10.5 | 0.95× |" in text
    assert "| H100 | questions on documents, 6 per second | 2 → 4 | 2.0 → 4.0 | 4.0 → 8.0 | 2 → 4 |" in text
    assert "| 2 × H100 | bf16 | `fa3@16`, `trunk@16` | 194 of 200 | 0.0312 | 0.0156 | 0.0312 | 3 % |" in text
    assert "| 2 × H100 | fp8 (**differs**) |" in text and "failed: trunk@16: no memory" in text
    assert "| H100 | `trunk@16` | cudaEventSynchronize 20 | none | 700 → 702 | 10,000 |" in text
    assert text.count("sglang 0.5.17, commit abc") == 4
    losses = {(loss.where, loss.than, loss.by) for section in made for loss in section.losses}
    assert ("SGLang, H100, `fa3+trunk@16`: nothing shared", "FlashAttention-3", "1.05×") in losses
    assert len(losses) == 1 + 4


def test_sglang_has_no_section_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert sglang.sections() == []


def write_tpot(folder: Path, name: str, ours: dict[str, Any], stock: dict[str, Any], **more: Any) -> None:
    """A result of tpot.py with one batch."""
    origin = {"date": "2099-01-01", "commit": "abc", "device": "a host", "versions": {"vllm": "0.33.0"}, "cards": 2}
    rows = [{"workload": "32 x (2048)", "FLASH_ATTN": stock, "CUSTOM": ours}]
    runs = {each: {"card": "NVIDIA H100"} for each in ("FLASH_ATTN", "CUSTOM")}
    (folder / f"{name}.json").write_text(json.dumps(origin | {"rows": rows, "runs": runs} | more))


def test_other_models_and_caches_are_found_by_their_names(results: Path) -> None:
    assert (vllm.models(), vllm.ranks(), vllm.start()) == (None, None, None)
    names = ("h100-gpt-oss", "h200-qwen2.5-7b-fp8", "h100-fp8", "h100", "h100-0.26", "h100-invariant", "h200-tp2")
    for number, name in enumerate(names):
        write_tpot(results, f"vllm-tpot-{name}", {"tpot_ms": 2.0}, {"tpot_ms": 2.0 + number})
    section = vllm.models()
    assert section is not None
    assert [line for line in section.text.splitlines() if "| nothing" in line] == [
        "| H100 | Llama-3-8B's shape, fp8 cache | nothing shared | 4.0 | 2.0 | 2.00× |",
        "| H100 | GPT-OSS | nothing shared | 2.0 | 2.0 | 1.00× |",
        "| H200 | Qwen2.5-7B, fp8 cache | nothing shared | 3.0 | 2.0 | 1.50× |",
    ]
    assert "busy" not in section.text and section.losses == []


def test_the_time_of_the_card_is_shown_where_it_was_traced(results: Path) -> None:
    ours, stock = {"tpot_ms": 3.0, "busy_ms": 1.24}, {"tpot_ms": 2.0, "busy_ms": 2.0}
    write_tpot(results, "vllm-tpot-h100-gpt-oss", ours, stock)
    section = vllm.models()
    assert section is not None and "| H100 | GPT-OSS | nothing shared | 2.0 | 1.2 |" in section.text
    assert [loss.by for loss in section.losses] == ["1.50×"]


def test_sections_on_ranks_and_on_starts_show_both_back_ends(results: Path) -> None:
    write_tpot(results, "vllm-tpot-h100-dcp2", {"tpot_ms": 7.0}, {"tpot_ms": 10.5})
    runs = {"FLASH_ATTN": {"ready_s": 97.1}, "CUSTOM": {"ready_s": 100.3}}
    write_tpot(results, "vllm-tpot-h100-cold", {"tpot_ms": 1.0}, {"tpot_ms": 1.0}, runs=runs)
    ranks, start = vllm.ranks(), vllm.start()
    assert ranks is not None and "| H100 | 2 cards | nothing shared | 10.5 | 7.0 | 1.50× |" in ranks.text
    assert start is not None and "| H100 | 97 | 100 | +3 |" in start.text
    assert [loss.where for loss in start.losses] == ["vLLM, H100: start with empty caches"]


@pytest.mark.parametrize("runs", [{"FLASH_ATTN": {"ready_s": 97.1}}, {"FLASH_ATTN": {"ready_s": 97.1}, "CUSTOM": {}}])
def test_a_result_that_was_cut_is_not_on_the_page(results: Path, runs: dict[str, Any]) -> None:
    """Of a back end that was not ready, or had not ended."""
    write_tpot(results, "vllm-tpot-h100-cold", {"tpot_ms": 1.0}, {"tpot_ms": 1.0}, runs=runs)
    assert vllm.start() is None
    write_tpot(results, "vllm-tpot-h100-dcp2", {"tpot_ms": 1.0}, {"tpot_ms": 1.0}, runs={"FLASH_ATTN": {"card": ""}})
    write_tpot(results, "vllm-tpot-h100-fp8", {"tpot_ms": 1.0}, {"tpot_ms": 1.0}, runs={"FLASH_ATTN": {"card": ""}})
    assert (vllm.ranks(), vllm.models()) == (None, None)
    write_tpot(results, "vllm-tpot-h100-fp8-dcp2", {"tpot_ms": 1.0}, {"tpot_ms": 1.0})
    assert vllm.ranks() is None
