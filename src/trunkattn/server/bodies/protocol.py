"""The bodies of requests: OpenAI's fields, and those of vLLM that the engine has too.

Types and sizes are checked here, strictly; types that several fields have are in `fields`, sizes in `limits`. Ranges
of numbers are checked by `SamplingParams`, in one place for all ways in. A null counts as a field that is absent.
`Body` says what happens to other names.

Source: https://platform.openai.com/docs/api-reference, https://docs.vllm.ai/en/latest/serving/openai_compatible_server.
"""

from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from trunkattn.server.bodies.body import Body, refuse
from trunkattn.server.bodies.fields import (
    AllowedIds,
    AnyJson,
    BadWords,
    Biases,
    Choices,
    Grammar,
    Label,
    Name,
    Number,
    Prompt,
    Regex,
    StopIds,
    Stops,
    StopText,
    Temperature,
    TopK,
)
from trunkattn.server.limits import LIMITS
from trunkattn.validate import shown


class StreamOptions(Body):
    """Options of a stream. include_usage: it ends with the counts of tokens. continuous_usage_stats: every event has
    them."""

    without_effect = frozenset({"include_obfuscation"})
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """OpenAI's envelope of a JSON schema. An answer follows the schema, strict or not."""

    without_effect = frozenset({"description", "strict"})
    name: Name
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """What the answer must be: text, any JSON object, or JSON of a schema. schema: the schema beside json_object, where
    llama.cpp, Together and Fireworks take it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


# Forms of answers as vLLM had them once, and as llama.cpp and SGLang have them
_OTHER_FORMS: Final = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
    *("json_schema", "regex", "grammar", "ebnf", "structural_tag"),
)
_ONE_FORM: Final = "this server has one way to write a form; leave it out"
# Fields of vLLM's requests that would change an answer or its response, and that this server does not have
_OTHER_ANSWERS: Final = (
    *("return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text"),
    *("repetition_detection", "thinking_token_budget", "watermarking", "vllm_xargs"),
)
# Fields that would make another prompt of a conversation, and what to send instead
_OTHER_PROMPTS: Final = MappingProxyType(
    {
        "functions": "expected tools instead",
        "chat_template": "this server runs only the model's own template; leave it out",
        "documents": "expected the documents in messages instead",
    }
)
# Fields of a chat that say what the model is to read
_OF_CHATS: Final = (
    *("messages", "tools", "functions", "documents", "chat_template", "chat_template_kwargs"),
    "continue_final_message",
)


class StructuredOutputs(Body):
    """vLLM's constraints on an answer; exactly one of them."""

    without_effect = frozenset({"disable_fallback"})
    refused = MappingProxyType(
        {
            "disable_any_whitespace": _ONE_FORM,
            "disable_additional_properties": "expected additionalProperties in the schema instead",
            "whitespace_pattern": _ONE_FORM,
            "structural_tag": "expected json, regex, choice, grammar or json_object instead",
        }
    )
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None


class Sampling(Body):
    """How to sample. None: the model's default.

    best_of: must be `n`, because no answer is thrown away here. truncation_side: where a prompt is cut.
    user: a name that goes into the log. cache_salt: only requests of equal salt share cached prefixes.
    return_token_ids: the response has the tokens of the prompt and of the answers, as numbers.
    """

    without_effect = frozenset(
        {"store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    ) | {"safety_identifier"}
    refused = MappingProxyType(
        {
            **dict.fromkeys(_OTHER_FORMS, "expected structured_outputs instead"),
            **dict.fromkeys(("max_new_tokens", "max_output_tokens", "n_predict"), "expected max_tokens instead"),
            **dict.fromkeys(_OTHER_ANSWERS, "this server does not have it; leave it out"),
            "logprob_token_ids": "expected logprobs instead",
            "min_new_tokens": "expected min_tokens instead",
            "stop_regex": "expected stop instead",
            "no_stop_trim": "expected include_stop_str_in_output instead",
            "suffix": "this server cannot fill in; leave it out",
            "use_beam_search": "this server has no beam search; leave it out",
            "logits_processors": "this server runs no code of a request; leave it out",
            "prompt_logprobs": "expected echo and logprobs of /v1/completions instead",
            "prompt_embeds": "expected a prompt of text or token ids",
        }
    )
    model: Label | None = None
    n: int = 1
    best_of: int | None = None
    temperature: Temperature | None = None
    top_p: Number | None = None
    top_k: TopK | None = None
    min_p: Number | None = None
    seed: int | None = None
    stop: StopText | Stops | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Biases | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: AllowedIds | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left"] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: Label | None = None
    user: Label | None = None


class CompletionRequest(Sampling):
    """Body of /v1/completions. add_special_tokens: a text becomes tokens with those that the tokenizer adds, such as
    one that begins it."""

    most_values = LIMITS.values
    refused = MappingProxyType(
        {
            **Sampling.refused,
            **dict.fromkeys(_OF_CHATS, "expected a request to /v1/chat/completions with it"),
            "max_completion_tokens": "expected max_tokens instead",
            "top_logprobs": "expected logprobs, a number, instead",
        }
    )
    prompt: Prompt
    echo: bool = False
    logprobs: Annotated[int, Field(le=LIMITS.logprobs)] | None = None
    add_special_tokens: bool = True


def _text_type(given: Any) -> Any:
    if given == "thinking":
        raise refuse("thinking", "expected reasoning_content of the message instead")
    if isinstance(given, str) and given not in get_args(_TextType):
        raise refuse("part", "expected 'text'; this server reads no images, sounds or files")
    return given


# The first is OpenAI's for chats, the next two are those of its responses, which vLLM takes in chats too.
_TextType = Literal["text", "input_text", "output_text", "refusal"]


class TextPart(Body):
    """A part of a message. Images and sounds are refused: nothing in a request makes the server fetch anything."""

    without_effect = frozenset({"cache_control", "prompt_cache_breakpoint", "annotations", "logprobs"})
    type: Annotated[_TextType, BeforeValidator(_text_type)]
    text: str = ""
    refusal: str = ""


def _function_type(given: Any) -> Any:
    if isinstance(given, str) and given != "function":
        raise refuse("other_tool", "expected 'function'; this server has no tools of another kind")
    return given


def _choice_type(given: Any) -> Any:
    if given == "allowed_tools":
        raise refuse("allowed_tools", "expected 'auto' or 'required' as tool_choice, and only tools that are allowed")
    return given


FunctionType = Annotated[Literal["function"], BeforeValidator(_function_type)]


class FunctionCall(Body):
    """A call that the model made in an earlier answer. arguments: JSON text, or the object that it stands for."""

    without_effect = frozenset({"parsed_arguments"})
    name: Name
    arguments: str | AnyJson = "{}"


class ToolCall(Body):
    """A tool call in the conversation."""

    without_effect = frozenset({"index"})
    id: Label | None = None
    type: FunctionType = "function"
    function: FunctionCall


class Message(Body):
    """A message of the conversation. reasoning_content: what the model thought, for templates that read it."""

    without_effect = frozenset(
        {"refusal", "annotations", "audio", "parsed", "type", "index", "cache_control", "reasoning"}
    ) | {"provider_specific_fields"}
    refused = MappingProxyType({"function_call": "expected tool_calls instead"})
    role: Name
    content: str | Annotated[list[TextPart], Field(max_length=LIMITS.parts, fail_fast=True)] | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=LIMITS.tool_calls, fail_fast=True)] | None = None
    tool_call_id: Label | None = None


class FunctionDefinition(Body):
    """A function that the model may call. parameters: a JSON schema. strict: for templates that show it."""

    name: Annotated[Name, Field(min_length=1)]
    description: str | None = None
    parameters: AnyJson | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    without_effect = frozenset({"cache_control"})
    type: FunctionType
    function: FunctionDefinition


class FunctionName(Body):
    """The function of a named choice."""

    name: Name


class NamedToolChoice(Body):
    """The one tool that the model must call."""

    type: Annotated[FunctionType, BeforeValidator(_choice_type)]
    function: FunctionName


Messages = Annotated[list[Message], Field(min_length=1, max_length=LIMITS.messages, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=LIMITS.tools, fail_fast=True)]


def _function_call(given: Any) -> Any:
    if given not in ("none", "auto"):
        raise refuse("function_call", "expected tool_choice instead")
    return given


class ChatCompletionRequest(Sampling):
    """Body of /v1/chat/completions. function_call: OpenAI's name for the choice among functions, of which there are
    none here."""

    without_effect = Sampling.without_effect | {"reasoning_effort", "verbosity", "prediction"}
    refused = MappingProxyType(
        {
            **Sampling.refused,
            **_OTHER_PROMPTS,
            "prompt": "expected messages instead",
            "audio": "this server makes only text; leave it out",
            "moderation": "this server moderates nothing; leave it out",
            "web_search_options": "this server asks no other host; leave it out",
            "echo": "this server sends only the answer; leave it out",
            "add_special_tokens": "the model's template writes them; leave it out",
        }
    )
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(le=LIMITS.logprobs)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    function_call: Annotated[Literal["none", "auto"], BeforeValidator(_function_call)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=LIMITS.modalities, fail_fast=True)] | None = None
    chat_template_kwargs: AnyJson | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TokenizeRequest(Body):
    """Body of /tokenize: a text or a conversation, with what a chat's prompt is made of."""

    refused = MappingProxyType(
        {
            **_OTHER_PROMPTS,
            "return_token_strs": "expected /detokenize for the text of tokens",
            "truncate_prompt_tokens": "all tokens are counted here; leave it out",
        }
    )
    model: Label | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: AnyJson | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _of_one_kind(self) -> "TokenizeRequest":
        """Fields of a text do nothing beside a conversation, and the other way round."""
        if self.messages is not None and self.add_special_tokens:
            raise refuse("refused_field", "add_special_tokens=True: the model's template writes them; leave it out")
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            value = getattr(self, name)
            if self.prompt is not None and value not in (type(self).model_fields[name].default, [], {}):
                raise refuse("refused_field", f"{name}={shown(value)}: expected messages, not a prompt, beside it")
        return self


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    most_values = LIMITS.values
    model: Label | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
