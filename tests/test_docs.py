"""What README and docs claim, beside what is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readme_quotes_figures_that_the_results_have() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    table = (ROOT / "README.md").read_text().partition("## Speed")[2].partition("\n## ")[0].replace("**", "")
    rows = [line.split("|")[3:-1] for line in table.splitlines() if re.match(r"\| [^|]+ \| [A-Z] \|", line)]
    figures = [cell.strip() for row in rows for cell in row]
    assert len(figures) == 21
    # The time to a first token stands behind the goodput.
    missing = [figure for figure in figures if not re.search(rf"[|;] {re.escape(figure)}[ ;|]", results)]
    assert missing == []
