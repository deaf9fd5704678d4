"""OpenAI's completions. The app, and APIs that take prompts in the same forms, may enter."""

from services.gateway.apis.completions.reading import COMPLETION, cut, prompts_of, read_completion

__all__ = ["COMPLETION", "cut", "prompts_of", "read_completion"]
