"""Options of the server. They are validated when created, and then frozen."""

from __future__ import annotations

from pydantic import Field

from adafuse_llm.config import Options

__all__ = ["ServingConfig"]


class ServingConfig(Options):
    """Options of the server: names, limits, and who may use it.

    Raises:
        InvalidOptionError: an option is unknown or out of range.
    """

    served_model_name: str = Field(
        default="adafuse",
        min_length=1,
        description="Name of the ensemble in requests. The members have their own names.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host names that requests may be sent to, without ports, such as "
        "llm.example.org or *.example.org. Default: any.",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins whose pages may use the server from a browser, such as "
        "https://app.example.org. Default: none but the server's own page.",
    )
    max_body_bytes: int = Field(
        default=4 * 2**20, ge=1024, description="Maximum bytes of the body of a request."
    )
    max_prompt_characters: int | None = Field(
        default=None,
        ge=1,
        description="Maximum characters of a prompt, or of all messages and tools of a chat. "
        "Default: the body size and the members' context windows are the only limits.",
    )
    max_output_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Highest `max_tokens` that a request may ask for. Default: no limit.",
    )
    max_choices: int = Field(
        default=128,
        ge=1,
        description="Maximum number of responses to one request: its prompts times its `n`.",
    )
    request_timeout: float | None = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="Maximum seconds that a request waits and decodes. None: no limit.",
    )
    send_timeout: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="Maximum seconds that the server waits for a client that does not read.",
    )
    drain_seconds: float = Field(
        default=5.0,
        ge=0,
        le=86_400,
        description="Seconds that running requests may take after the signal to stop. Then they "
        "end with the text so far.",
    )
    page: bool = Field(default=True, description="Whether the page at / exists.")
    log_prompts: bool = Field(
        default=False, description="Whether the log has the body of each request."
    )
