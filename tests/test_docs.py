"""Claims of README and docs, beside what is there. Their commands are run by tests/e2e/test_docs.py."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import __version__

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "benchmarks|deploy|docs|examples|models|protos|services|tandem|tests"
DECISION = ("What is so", "Why", "What was tried", "What would change our mind")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_quotes_figures_that_the_results_have() -> None:
    results = text_of("benchmarks/RESULTS.md")
    table = text_of("README.md").partition("## Speed")[2].partition("\n## ")[0].replace("**", "")
    rows = [line.split("|")[3:-1] for line in table.splitlines() if re.match(r"\| [^|]+ \| [A-Z] \|", line)]
    figures = [cell.strip() for row in rows for cell in row]
    assert len(figures) == 21
    # The time to a first token stands behind the goodput.
    missing = [figure for figure in figures if not re.search(rf"[|;] {re.escape(figure)}[ ;|]", results)]
    assert missing == []


def test_results_are_read_in_one_go() -> None:
    assert len(text_of("benchmarks/RESULTS.md").splitlines()) <= 250, "a new row replaces one"


def test_files_that_pages_name_are_there() -> None:
    named = {
        (page.name, path)
        for page in PAGES
        for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", page.read_text(encoding="utf-8"))
    }
    assert {(page, path) for page, path in named if page != "CHANGELOG.md" and not (ROOT / path).exists()} == set()


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http", "#")):
                yield page, target


def test_links_lead_somewhere() -> None:
    assert [(page.name, to) for page, to in links() if not (page.parent / to.partition("#")[0]).exists()] == []


def test_headings_that_links_name_are_there() -> None:
    for page, target in links():
        file, _, heading = target.partition("#")
        if heading and file.endswith(".md"):
            found = re.findall(r"^#+ (.*)$", (page.parent / file).read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}
            assert heading in slugs, (page.name, target)


def test_modules_and_targets_that_pages_name_are_there() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(re.findall(r"[`\n]make ([a-z-]+)", text)) <= targets
    for module in set(re.findall(rf"python -m ((?:{FOLDERS})[\w.]*\w)", text)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_each_failure_says_who_detects_it_when_what_follows_and_where_that_is() -> None:
    sections = text_of("docs/failures.md").partition("## Failures\n")[2].partition("\n## ")[0].split("\n### ")[1:]
    assert len(sections) >= 24
    parts = ("- **Detected by** ", "- **Within** ", "- **Then** ", "- **Code** ")
    for section in sections:
        title, *lines = filter(None, section.splitlines())
        assert [line[: len(part)] for line, part in zip(lines, parts, strict=True)] == list(parts), title
        assert re.search(r"`(services|tandem)/[\w/]+\.(py|lua)`", lines[-1]), title


def defined_in(path: Path) -> set[str]:
    """Returns the functions, classes, methods as Class.method, and constants of a module."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.ClassDef():
                methods = (ast.FunctionDef, ast.AsyncFunctionDef)
                found |= {node.name, *(f"{node.name}.{one.name}" for one in node.body if isinstance(one, methods))}
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_questions_about_the_code_lead_to_what_is_there() -> None:
    table = text_of("docs/architecture.md").partition("## Where is …?")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 30
    assert [row for row in rows if not re.search(r"`(services|tandem)/|\]\(", row)] == []
    named = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", table)
    assert len(named) >= 30
    assert [(path, name) for path, name in named if name not in defined_in(ROOT / path)] == []


def test_decisions_say_what_was_tried_and_what_would_change_them() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert len(pages) >= 10
    listed = re.findall(r"\]\((\d[^)]+)\)", text_of("docs/decisions/README.md"))
    assert listed == [page.name for page in pages]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert [part for part in DECISION if f"**{part}.**" not in text] == [], page.name
        assert len(text.splitlines()) <= 30, page.name


def test_one_version_and_one_licence() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "tandem.__version__"}
    assert re.search(r"^## (\S+?),? ", text_of("CHANGELOG.md"), re.MULTILINE)[1] == __version__
    assert project["project"]["license"] == "Apache-2.0"
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text_of("LICENSE")


def test_setting_up_shows_what_it_does() -> None:
    """pip is quiet for minutes else."""
    (pip,) = re.findall(r"^PIP := (.*)$", text_of("Makefile"), re.MULTILINE)
    assert not re.search(r" -q|--quiet", pip)
