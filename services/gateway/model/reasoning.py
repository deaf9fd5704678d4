"""How much a model may think: from the client's effort to template variables and a token budget.

reasoning_effort ─┬─ the template reads it: it decides
                  └─ it does not: a budget by BUDGETS, unless thinking_token_budget says one
A word that is not in BUDGETS is only a hint that nobody knows: the model thinks as where no client says anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.model.served import ServedModel

# Tokens; None: no limit.
BUDGETS: Mapping[str, int | None] = {
    "none": 0, "minimal": 512, "low": 1024, "medium": 8192, "high": 24576, "xhigh": None, "max": None,
}  # fmt: skip
EFFORT = "reasoning_effort"


def template_variables(said: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Returns the template's variables with the effort. `said`: the client's own variables."""
    variables = dict(said or {})
    if effort not in BUDGETS:
        return variables
    variables[EFFORT] = effort
    if effort == "none":
        variables.setdefault("enable_thinking", False)
    return variables


def budget_of(effort: str | None, model: ServedModel) -> dict[str, int]:
    """Returns the sampling parameters that the effort sets, if the model's template does not read it."""
    budget = BUDGETS.get(effort or "")
    if budget is None or model.thoughts is None or (model.chat_template and EFFORT in model.chat_template.source):
        return {}
    return {"thinking_token_budget": budget}
