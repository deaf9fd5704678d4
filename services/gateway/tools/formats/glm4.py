"""GLM-4: the function's name on a line, its arguments on the next; further calls after <|assistant|>."""

from __future__ import annotations

from services.gateway.tools.call import Schemas
from services.gateway.tools.formats.headed import NAME, OBJECT, SPACE, HeadedCalls, S, mark, partly, whole

BARE = (NAME, (r"[^\S\n]{0,8}\n", r"[^\S\n]{0,8}"), SPACE, OBJECT)
MARKED = (mark("<|assistant|>"), (S, S), *BARE)


class Glm4(HeadedCalls):
    begins = ("<|assistant|>",)
    heads = (whole(*BARE), whole(*MARKED))
    may_be_head = partly(BARE, MARKED)

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self.opens = tuple(f"{name}\n" for name in schemas)
