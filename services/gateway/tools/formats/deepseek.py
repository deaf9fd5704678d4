"""DeepSeek V3 and R1: calls between marks, with arguments in a JSON block; since V3.1 without the block.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f        <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re

from services.gateway.tools.call import begun
from services.gateway.tools.formats.headed import NAME, OBJECT, SPACE, HeadedCalls, S, mark, partly, whole

LIST, CALL, END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEP = mark("<｜tool▁sep｜>")
OLD = (mark(CALL), mark("function"), SEP, NAME, SPACE, mark("```json"), SPACE, OBJECT)
NEW = (mark(CALL), NAME, SEP, SPACE, OBJECT)
IN_LIST = (mark(LIST), SPACE)
TAIL = re.compile(rf"{S}(?:```{S})?{re.escape(END)}")
MAY_BE_TAIL = re.compile(rf"{S}(?:{begun('```')}|```{S}{begun(END)}|{begun(END)})?")


class DeepSeek(HeadedCalls):
    begins = (LIST, CALL)
    parts = ("<｜tool▁sep｜>", END)
    closers = ("<｜tool▁calls▁end｜>",)
    heads = (whole(*OLD), whole(*NEW), whole(*IN_LIST, *OLD), whole(*IN_LIST, *NEW))
    may_be_head = partly(OLD, NEW, (*IN_LIST, *OLD), (*IN_LIST, *NEW))

    def _behind(self, text: str, end: int) -> int | None:
        if tail := TAIL.match(text, end):
            return tail.end()
        return None if not self._ended and MAY_BE_TAIL.fullmatch(text, end) else end
