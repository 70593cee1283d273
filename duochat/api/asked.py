"""What clients ask, as messages and Options. What would change the answer and is not honoured is refused."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.responses import JSONResponse

from duochat import DuoChatError
from duochat.chat.chat import SETTINGS, Options
from duochat.chat.grammar import ANYTHING
from duochat.chat.text import Messages
from duochat.config import check

WITHOUT_EFFECT = {
    "cache_prompt", "id_slot", "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "timings_per_token", "user",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {  # values with which a field asks for nothing
    "best_of": (1,), "echo": (False,), "functions": ([],), "modalities": (["text"],), "suffix": ("",), "tools": ([],),
    "tool_choice": ("none", "auto"),
}  # fmt: skip
HONOURED = {*SETTINGS} - {"system"}  # checked as settings are; a system prompt is one of the messages
MOST = 128  # answers to one request, and strings that end each
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refused(Exception):
    """A refusal in OpenAI's form: an HTTP status and one sentence. param: the field that is wrong."""

    def __init__(self, status: int, sentence: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, {}
        kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": sentence, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


class Given(BaseModel):
    """A value null is one that was not given."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, raw: Any) -> Any:
        return {name: value for name, value in raw.items() if value is not None} if isinstance(raw, dict) else raw


class Message(Given):
    """Parts of text are joined by line breaks."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str = ""
    tool_calls: list[Any] = Field([], max_length=0)

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        if not all(isinstance(part, dict) and part.get("type") in ("text", "input_text") for part in content):
            raise ValueError("only parts of text can be read: leave out the others")
        return "\n".join(str(part.get("text", "")) for part in content)


class Named(Given):
    schema_: dict[str, Any] = Field(alias="schema")


class Format(Given):
    """json_object may have a schema too, as llama-server takes it."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: Named | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _with_schema(self) -> Format:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type of that name")
        return self

    def wanted(self) -> dict[str, Any] | None:
        """None: any text."""
        if self.type == "text":
            return None
        return self.json_schema.schema_ if self.json_schema else self.schema_ or ANYTHING


class Asked(Given):
    """A request for completions of `messages` or of `prompt`, which is continued as it stands."""

    model_config = ConfigDict(extra="allow")
    model: str
    messages: list[Message] = Field([], min_length=1)
    prompt: tuple[str, ...] = Field((), min_length=1, max_length=MOST)
    stream: bool = False
    stream_options: dict[str, Any] = {}
    n: int = Field(1, ge=1, le=MOST)
    logprobs: Any = False  # of a prompt's answer: a number of alternatives
    top_logprobs: int = Field(0, ge=0, le=20)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: tuple[str, ...] = Field((), max_length=MOST)
    response_format: Format = Format()
    json_schema: dict[str, Any] | None = None  # llama-server's word for it
    duochat: dict[Literal["origins"], bool] = {}  # origins: say of every token where it comes from

    @field_validator("messages")
    @classmethod
    def _one_to_continue(cls, messages: list[Message]) -> list[Message]:
        if [message.role for message in messages[-2:]] == ["assistant", "assistant"]:
            raise ValueError("two of the assistant at the end leave open which to continue: join them")
        return messages

    @model_validator(mode="after")
    def _together(self) -> Asked:
        if self.n * len(self.prompt) > MOST:
            raise ValueError(f"n times the prompts is {self.n * len(self.prompt)}: ask for {MOST} answers at most")
        number = isinstance(self.logprobs, int) and (isinstance(self.logprobs, bool) or bool(self.prompt))
        if not number or not 0 <= self.logprobs <= 20:
            raise ValueError("logprobs is true or false; with a prompt it is a number up to 20")
        return self

    @property
    def alternatives(self) -> int | None:
        """How many are wanted of each token; None: not even its own probability."""
        if self.prompt:
            return None if self.logprobs is False else int(self.logprobs)
        return self.top_logprobs if self.logprobs else None

    @field_validator("stop", "prompt", mode="before")
    @classmethod
    def _several(cls, texts: Any) -> Any:
        return (texts,) if isinstance(texts, str) else tuple(texts) if isinstance(texts, list) else texts

    def prompts(self) -> list[Messages | str]:
        told = [{"role": m.role.replace("developer", "system"), "content": m.content} for m in self.messages]
        return [told] if told else [*self.prompt]

    def _schema(self) -> str:
        schema = self.response_format.wanted() if self.json_schema is None else self.json_schema
        return "" if schema is None else json.dumps(schema)

    def options(self, settings: Any) -> Options:
        """The given values over the settings'. Raises Refused."""
        given: dict[str, Any] = {"stop": self.stop} if "stop" in self.model_fields_set else {}
        if most := self.max_completion_tokens or self.max_tokens:
            given["max_tokens"] = min(most, settings.context_length)  # more than that is "as many as fit"
        for name, value in (self.model_extra or {}).items():
            if name in HONOURED:
                given[name] = value
            elif name not in (*NEUTRAL, *WITHOUT_EFFECT):
                raise Refused(400, f"There is no field {name}: leave it out.", name, "unknown_parameter")
            elif name in NEUTRAL and value not in NEUTRAL[name]:
                sentence = f"{name} is not supported: leave it out, or give {NEUTRAL[name][0]!r}."
                raise Refused(400, sentence, name, "unsupported_parameter")
        checked = {name: _checked(name, value) for name, value in given.items()}
        return Options.of(settings, schema=self._schema(), **checked)


def _checked(name: str, value: Any) -> Any:
    try:
        return check(name, value)
    except DuoChatError as fault:
        raise Refused(400, str(fault), name, "invalid_value") from None


def read(body: bytes, what: str) -> Asked:
    """what: "messages" or "prompt", the field to be answered. Raises Refused when the body is no such request."""
    try:
        asked = Asked.model_validate_json(body)
    except ValidationError as fault:
        first = fault.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        reason = first["msg"].removeprefix("Value error, ")
        raise Refused(400, f"{place or 'The body'}: {reason}.", place or None, first["type"]) from None
    if asked.model_fields_set & {"messages", "prompt"} != {what}:
        raise Refused(400, f"Give {what}, and no other text to answer.", what, "missing")
    return asked
