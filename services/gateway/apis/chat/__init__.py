"""OpenAI's chat completions. The app, and APIs whose bodies have the messages of a chat, may enter."""

from services.gateway.apis.chat.reading import CHAT, chat_in, read_chat, read_messages

__all__ = ["CHAT", "chat_in", "read_chat", "read_messages"]
