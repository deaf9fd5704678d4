"""POST /v1/responses: OpenAI's Responses, told to the chat endpoint and answered in items and events of their own."""

from services.gateway.http.responses.conversion import chat_of
from services.gateway.http.responses.reading import read_response
from services.gateway.http.responses.schema import ResponseBody, read_body

__all__ = ["ResponseBody", "chat_of", "read_body", "read_response"]
