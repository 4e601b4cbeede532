"""What clients send, in OpenAI's terms: the shape is checked here, ranges where `SamplingParams` is made of it."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from legato.errors import InvalidValueError

# Fields that clients send and that change nothing here.
_WITHOUT_EFFECT = frozenset({
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "stream_options.include_obfuscation",
})  # fmt: skip
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "n", "seed", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "json_schema", "regex", "choice", "grammar",
)  # fmt: skip
# What other servers, or other endpoints, call what an answer must be like.
CONSTRAINTS_ELSEWHERE = {
    "structured_outputs": "json_schema, regex, choice or grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "response_format": "json_schema, or text.format of /v1/responses",
    "text": "response_format of /v1/chat/completions, or json_schema",
}
MOST_TOOLS = 128
MOST_FIELDS = 1000

Entry = TypeVar("Entry")
# What is wrong with one entry is told, not with each of a million: that would take seconds, in the server's loop.
ListOf = Annotated[list[Entry], Field(fail_fast=True)]


def _values(kinds: type | tuple[type, ...], said: str) -> Callable[[Any], Any]:
    """`fail_fast` for the values of a dict, for which pydantic has none."""

    def check(given: Any) -> Any:
        values = given.items() if isinstance(given, dict) else ()
        wrong = next((name for name, value in values if not isinstance(value, kinds) or isinstance(value, bool)), None)
        if wrong is not None:
            raise ValueError(f"the value of {wrong[:40]!r} must be {said}")
        return given

    return check


class Sent(BaseModel):
    """An object that clients send."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        """Clients send null for what they leave out."""
        if not isinstance(given, dict):
            return given
        if len(given) > MOST_FIELDS:
            raise ValueError(f"there are {len(given)} fields: at most {MOST_FIELDS} are allowed")
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(Sent):
    """See OpenAI's reference."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool = False


class JsonSchema(Sent):
    """A named schema."""

    model_config = ConfigDict(extra="forbid")
    name: str = "answer"
    description: str | None = None
    strict: bool | None = Field(default=None, description="It always is, here.")
    definition: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(Sent):
    """What the answer must be. What is not known is refused: nothing would hold the answer to it."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class Call(Sent):
    """What all requests have."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None

    def nested(self) -> dict[str, BaseModel | None]:
        """Objects in it whose unknown fields are told of too."""
        return {}

    def ignored_fields(self) -> list[str]:
        """Names that were sent and mean nothing here, those apart that change nothing anywhere."""
        inner = [
            f"{name}.{one}" for name, given in self.nested().items() for one in (given and given.model_extra) or ()
        ]
        return sorted({*(self.model_extra or {}), *inner} - _WITHOUT_EFFECT)


class GenerationRequest(Call):
    """What answers are asked for by: OpenAI's fields, and further ones by `SamplingParams`' names.

    Attributes:
        default_tokens: new ones at most where the call does not say, as long as there is room.
    """

    default_tokens: ClassVar[int]

    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_values((int, float), "a number"))] = None
    n: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    def renamed(self) -> dict[str, str]:
        """What fields of `SamplingParams` are called here, where that is not their own name."""
        return {}

    def sampling(self) -> dict[str, Any]:
        """What is set of `SamplingParams`."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.min_tokens is not None:
            given["min_new_tokens"] = self.min_tokens
        if self.seed is not None:
            given["seed"] = self.seed % (1 << 64)  # OpenAI's may be negative
        return given

    def new_tokens(self) -> int | None:
        """New tokens at most, as asked for."""
        return self.max_tokens

    def only_scores(self) -> bool:
        """Whether nothing is to be generated, and the prompt's log-probabilities are all that is wanted."""
        return False

    def nested(self) -> dict[str, BaseModel | None]:
        return {"stream_options": self.stream_options}


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(BaseModel):
    """A tool; only functions are known."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: Function


class FunctionName(BaseModel):
    """Of the function that must be called."""

    name: str


class NamedTool(BaseModel):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | ListOf[dict[str, Any]] | None = None


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    default_tokens: ClassVar[int] = 1024

    messages: ListOf[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[ToolDefinition] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    def renamed(self) -> dict[str, str]:
        schema = {} if self.json_schema is not None else {"json_schema": "response_format"}
        tokens = {} if self.max_completion_tokens is None else {"max_new_tokens": "max_completion_tokens"}
        return {
            "input_ids": "messages",
            "logprobs": "top_logprobs",
            **tokens,
            **schema,
            **({"grammar": "tools"} if self.tools and self.tool_choice != "none" else {}),
        }

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidValueError(f"top_logprobs={self.top_logprobs} is not allowed: it needs logprobs=True")
        schema = self.answer_schema()
        if schema is None:
            return given
        if "json_schema" in given:
            raise InvalidValueError("json_schema is not allowed where the form of the answer is said already")
        return {**given, "json_schema": schema}

    def answer_schema(self) -> dict[str, Any] | None:
        """What `response_format` asks for."""
        wanted = self.response_format
        if wanted is None:
            return None
        if (wanted.json_schema is None) == (wanted.type == "json_schema"):
            raise InvalidValueError("response_format must have a schema if its type is 'json_schema', else none")
        if wanted.json_schema is not None:
            return wanted.json_schema.definition
        return {"type": "object"} if wanted.type == "json_object" else None

    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    default_tokens: ClassVar[int] = 16

    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
            if self.echo:
                given["prompt_logprobs"] = self.logprobs
        return given

    def only_scores(self) -> bool:
        return self.max_tokens == 0 and self.echo and self.logprobs is not None and self.n in (None, 1)

    def prompts(self) -> list[str] | list[list[int]]:
        """Each of them by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TokenizeRequest(Call):
    """`POST /tokenize`: a text, or a conversation up to where its answer begins."""

    prompt: str | None = Field(default=None, description="A text; a conversation comes as `messages`.")
    messages: ListOf[Message] | None = None


class DetokenizeRequest(Call):
    """`POST /detokenize`."""

    tokens: ListOf[int]


class TextFormat(Sent):
    """What the answer must be."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(default=None, description="It always is, here.")
    definition: dict[str, Any] | None = Field(default=None, alias="schema")


class TextSettings(Sent):
    """See OpenAI's reference."""

    model_config = ConfigDict(extra="allow")
    format: TextFormat = Field(default_factory=TextFormat)


class FunctionTool(Function):
    """A function that the model may call, as `/v1/responses` describes it."""

    type: Literal["function"]


class NamedFunction(BaseModel):
    """The function that must be called."""

    type: Literal["function"] = "function"
    name: str


class ResponsesRequest(GenerationRequest):
    """`POST /v1/responses`. Nothing is kept: `input` is the whole conversation."""

    default_tokens: ClassVar[int] = ChatRequest.default_tokens

    input: str | ListOf[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextSettings = Field(default_factory=TextSettings)
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_values(str, "a text"))] = None

    def renamed(self) -> dict[str, str]:
        tokens = {} if self.max_output_tokens is None else {"max_new_tokens": "max_output_tokens"}
        schema = {} if self.json_schema is not None else {"json_schema": "text"}
        return {
            "input_ids": "input",
            "messages": "input",
            "response_format": "text",
            **tokens,
            **schema,
            **({"grammar": "tools"} if self.tools and self.tool_choice != "none" else {}),
        }

    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    def nested(self) -> dict[str, BaseModel | None]:
        return {**super().nested(), "text": self.text}
