"""`LLM`: a model, its tokenizer and an engine behind `generate`, `chat` and `stream`."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils import logging

from trunkattn.engine.assembly import attention_config, make_cache, make_runner, size_cache
from trunkattn.engine.config import EngineConfig, SamplingParams
from trunkattn.engine.engine import Engine, ModelLimits
from trunkattn.engine.model import eos_token_ids, inspect_model, load_model, load_tokenizer
from trunkattn.engine.outputs import RequestOutput
from trunkattn.engine.scheduler import Scheduler
from trunkattn.engine.stats import EngineStats
from trunkattn.kv_cache.manager import CacheManager

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class _Prepared:
    """A checked request of one `generate` or `stream` call."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams


class LLM:
    """A local language model that answers many prompts at once and reads each shared prefix once per step.

    On a GPU each step replays a CUDA graph. A graph is captured at the first step of its padded number of tokens, which
    makes that step some tenths of a second slower; `warm_up` captures all graphs at once. With `enforce_eager` there
    are none.

    Args:
        model: a local Hugging Face folder (config.json and safetensors) or a GGUF file.
        options: fields of `EngineConfig`.

    Raises:
        TypeError, ValueError: an option is unknown or bad, a file is missing, truncated or foreign, or the model is not
            supported. Weights are loaded only after all other checks.

    Example:
        >>> llm = LLM("path/to/model", max_num_seqs=32)  # doctest: +SKIP
        >>> params = SamplingParams(temperature=0, max_tokens=32)  # doctest: +SKIP
        >>> for output in llm.generate(["Why is the sky blue?", "Why is grass green?"], params):  # doctest: +SKIP
        ...     print(output.outputs[0].text)
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        known = [option.name for option in fields(EngineConfig)]
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"{name}={value!r}: there is no such option; expected one of {', '.join(known)}")
        self.config = EngineConfig(**options)
        config = self.config
        info = inspect_model(
            model, config.dtype_name, config.device, config.load_format, config.trust_remote_code, config.kv_cache_dtype
        )
        attention_config(info, self.config)
        size_cache(info, self.config)
        self.info = info
        self.tokenizer = load_tokenizer(info)
        self.model = load_model(info)
        num_pages, max_model_len = size_cache(info, self.config, self.model)
        self.kv_cache = make_cache(info, self.config.page_size, num_pages)
        self._runner = make_runner(self.model, info, self.config, self.kv_cache, max_model_len)
        if info.device.type == "cuda":
            self._runner.warm_up([1])  # compiles kernels, and shows whether the model can be captured
        scheduler = Scheduler(
            CacheManager(num_pages, self.config.page_size, self.config.enable_prefix_caching),
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
            self.config.scheduler_policy,
        )
        eos = eos_token_ids(self.model.generation_config, self.tokenizer, info.config)
        self.engine = Engine(self._runner, scheduler, ModelLimits(info.vocab_size, max_model_len, eos), self.tokenizer)
        self._unfetched: dict[str, RequestOutput] = {}  # newest outputs that the calls they belong to have not seen

    def warm_up(self) -> None:
        """Compiles the planner and every kernel and captures every CUDA graph, so that no later step has to.

        On a CPU or with `enforce_eager` it compiles the planner alone. Call it while no request is unfinished.
        """
        self._runner.warm_up()

    @property
    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answers prompts.

        Args:
            prompts: one prompt or several. A prompt is a string, a list of token ids, or a mapping with "prompt" or
                "prompt_token_ids".
            sampling_params: one for all prompts, or one for each; None: `SamplingParams()`.
            use_tqdm: show a progress bar.

        Returns:
            One output per prompt, in their order.

        Raises:
            TypeError, ValueError: naming the bad prompt or parameter. No prompt of this call has started then.
        """
        prepared = self._prepare(prompts, sampling_params)
        results: dict[int, RequestOutput] = {}
        progress = logging.tqdm(total=len(prepared), desc="Requests", disable=not use_tqdm)
        with progress, closing(self._run(prepared)) as run:
            for position, output in run:
                if output.finished:
                    results[position] = output
                    progress.update()
        return [results[position] for position in range(len(prepared))]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, whose prompts the tokenizer's chat template makes.

        Args:
            messages: a list of messages, or a list of such lists. A message is a mapping with "role", usually
                "content", and any other key that the template reads.
            sampling_params, use_tqdm: see `generate`.

        Returns:
            One output per conversation, in their order.

        Raises:
            TypeError, ValueError: naming the bad message or parameter, or the model has no chat template.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ValueError("messages: the model has no chat template; expected prompts, so call generate")
        _check_list("messages", messages)
        single = isinstance(messages[0], Mapping)
        conversations = {"messages": messages} if single else {f"messages[{i}]": it for i, it in enumerate(messages)}
        make = partial(self.tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
        prompts = [_fill_template(make, name, conversation) for name, conversation in conversations.items()]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Answers prompts and yields (position of the prompt, its output so far) whenever a prompt gets a token.

        The arguments are checked now; the computation starts with the first item. To close the iterator aborts its
        unfinished prompts. Several iterators and `generate` may be used in turn: they share the engine's steps.

        Args:
            prompts, sampling_params: see `generate`.

        Raises:
            TypeError, ValueError: see `generate`.

        Example:
            >>> for position, output in llm.stream(["Hello", "Goodbye"]):  # doctest: +SKIP
            ...     print(position, output.outputs[0].text)
        """
        return self._run(self._prepare(prompts, sampling_params))

    def _run(self, prepared: Sequence[_Prepared]) -> Generator[tuple[int, RequestOutput], None, None]:
        positions = {
            self.engine.add_request(request.token_ids, request.params, request.prompt): position
            for position, request in enumerate(prepared)
        }
        try:
            while positions:
                ready = [request_id for request_id in positions if request_id in self._unfetched]
                if not ready:
                    self._unfetched.update((output.request_id, output) for output in self.engine.step())
                for request_id in ready:
                    output = self._unfetched.pop(request_id)
                    position = positions[request_id]
                    if output.finished:
                        del positions[request_id]
                    yield position, output
        finally:
            for request_id in positions:
                self.engine.abort_request(request_id)
                self._unfetched.pop(request_id, None)

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[_Prepared]:
        """Tokenises and checks every prompt, so that a bad one stops the call before any has started."""
        if not isinstance(prompts, str | Mapping | Sequence) or isinstance(prompts, bytes | bytearray):
            raise TypeError(f"prompts={prompts!r}: expected one prompt or a list of prompts")
        single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        each: Sequence[Any] = [prompts] if single else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(each)
        elif isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            raise TypeError(f"sampling_params={sampling_params!r}: expected SamplingParams or a list of them")
        if len(params) != len(each):
            raise ValueError(f"sampling_params has {len(params)} items: expected one for each of {len(each)} prompts")
        prepared = []
        for position, (prompt, one) in enumerate(zip(each, params, strict=True)):
            name = f"prompts[{position}]"
            if not isinstance(one, SamplingParams):
                raise TypeError(f"sampling_params[{position}]={one!r}: expected SamplingParams")
            text, token_ids = self._tokenize(prompt, name)
            self.engine.check_request(token_ids, one, name)
            prepared.append(_Prepared(text, token_ids, one))
        return prepared

    def _tokenize(self, prompt: object, name: str) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if len(prompt.keys() & {"prompt", "prompt_token_ids"}) != 1:
                raise ValueError(f"{name} has the keys {sorted(prompt)}: expected one of prompt and prompt_token_ids")
            prompt = prompt.get("prompt", prompt.get("prompt_token_ids"))
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{name}={prompt!r}: expected token ids, because the model folder has no tokenizer")
            if not prompt:
                raise ValueError(f"{name}={prompt!r}: expected a prompt that is not empty")
            return prompt, self.tokenizer(prompt)["input_ids"]
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise TypeError(f"{name}={prompt!r}: expected a string, a list of token ids, or a mapping with one of them")
        return None, list(prompt)


def _check_list(name: str, value: Any) -> None:
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={value!r}: expected a list of messages, each with a role and a content")
    if not value:
        raise ValueError(f"{name}={value!r}: expected at least one message")


def _fill_template(make: Callable[[list[Message]], list[int]], name: str, conversation: Any) -> list[int]:
    """A conversation as token ids."""
    _check_list(name, conversation)
    for position, message in enumerate(conversation):
        if not isinstance(message, Mapping):
            raise TypeError(f"{name}[{position}]={message!r}: expected a mapping with a role and a content")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{name}[{position}]={message!r}: expected a role that is a string")
    try:
        return make(list(conversation))
    except (TemplateError, TypeError) as error:
        raise ValueError(f"{name}={conversation!r}: the model's chat template refuses it: {error}") from error
