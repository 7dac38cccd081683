"""The bodies of requests: OpenAI's fields, and those of vLLM that the engine has too. What is not here is refused.

Types are checked here, strictly. Ranges are checked by `SamplingParams`, in one place for all ways in.

Source: https://platform.openai.com/docs/api-reference, https://docs.vllm.ai/en/latest/serving/openai_compatible_server.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Number = float | int


class Body(BaseModel):
    """Unknown fields are refused, and no type is converted to another."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """include_usage: the stream ends with the counts of tokens."""

    include_usage: bool = False


class JsonSchema(Body):
    """OpenAI's envelope of a JSON schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must be: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's constraints on an answer; exactly one of them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Sampling(Body):
    """How to sample. None: the model's default.

    user: a name that goes into the log. cache_salt: only requests of equal salt share cached prefixes.
    """

    model: str | None = None
    n: int = 1
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    user: str | None = None


class CompletionRequest(Sampling):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None


class TextPart(Body):
    """A part of a message. Images and sounds are refused: nothing in a request makes the server fetch anything."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """A call that the model made in an earlier answer. arguments: JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    """A tool call in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """A message of the conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(Body):
    """A function that the model may call. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """The function of a named choice."""

    name: str


class NamedToolChoice(Body):
    """The one tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class ChatCompletionRequest(Sampling):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TokenizeRequest(Body):
    """Body of /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]
