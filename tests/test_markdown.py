"""Markdown of an answer that is still being written."""

from __future__ import annotations

import pytest
from rich.text import Text

from tandem.commands.markdown import BOLD, CODE, HEADING, Markdown

pytestmark = pytest.mark.fast
ANSWER = """# A *list*

- **bold** and `co*d*e`
  * 2 * 3 ** 4
-5 is no bullet, #1 no heading

```python
# no heading
- no **bullet**
```
1. `open
end **left"""
SHOWN = """A *list*

• bold and co*d*e
  • 2 * 3  4
-5 is no bullet, #1 no heading

# no heading
- no **bullet**
1. open
end left"""


def shown(parts: list[str]) -> Text:
    markdown, text = Markdown(), Text()
    for part in parts:
        text.append_text(markdown.feed(part))
    return text.append_text(markdown.end())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_an_answer_looks_the_same_however_it_comes(size: int) -> None:
    text = shown([ANSWER[i : i + size] for i in range(0, len(ANSWER), size)])
    assert text.plain == SHOWN
    styled = dict.fromkeys((BOLD, CODE, HEADING), "")
    for span in text.spans:
        if span.style in styled:
            styled[span.style] += text.plain[span.start : span.end]
    assert styled == {BOLD: "bold 4left", CODE: "co*d*e# no heading\n- no **bullet**\nopen", HEADING: "A *list*"}


def test_words_do_not_wait_for_the_line_to_end() -> None:
    markdown = Markdown()
    assert [markdown.feed(part).plain for part in ("One", " **tw", "o*", "* three", "\n#", "# Four")] == [
        "One", " tw", "o", " three", "\n", "Four",
    ]  # fmt: skip
