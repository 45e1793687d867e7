"""The official client libraries (OpenAI's, Anthropic's), as users have them, pointed at a port of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import openai

from tests.integration.sidecar import KEY


@dataclass(frozen=True)
class Library:
    """One of them, and the API of conversations that it is for."""

    module: Any
    """Its exceptions are there."""
    make: Callable[..., Any]
    base: str
    """Below it the library looks for the API."""
    path: str
    create: Callable[[Any], Callable[..., Any]]
    """A client → what asks the API."""

    def __str__(self) -> str:
        name: str = self.module.__name__
        return name

    def client(self, port: int, headers: dict[str, str] | None = None, timeout_s: float = 60.0) -> Any:
        """A context manager. It asks once: what goes wrong is for the test to see."""
        return self.make(
            base_url=f"http://127.0.0.1:{port}{self.base}",
            api_key=KEY.removeprefix("Bearer "),
            default_headers=headers,
            max_retries=0,
            timeout=timeout_s,
        )

    def ask(self, client: Any, text: str, *, model: str = "sim", max_tokens: int = 8, **more: Any) -> Any:
        """One turn."""
        said = [{"role": "user", "content": text}]
        return self.create(client)(model=model, messages=said, max_tokens=max_tokens, **more)


OPENAI = Library(
    openai, openai.OpenAI, "/v1", "/v1/chat/completions", lambda client: client.chat.completions.create
)
ANTHROPIC = Library(anthropic, anthropic.Anthropic, "", "/v1/messages", lambda client: client.messages.create)
LIBRARIES = (OPENAI, ANTHROPIC)
