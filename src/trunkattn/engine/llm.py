"""`LLM`: a model, its tokenizer and an engine behind `generate`, `chat` and `stream`."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers.utils import logging

from trunkattn.cpu.thread_limit import ThreadLimit
from trunkattn.cpu.truncation import compile_truncation
from trunkattn.engine.assembly import attention_config, keys_per_token, make_cache, make_runner
from trunkattn.engine.checked_request import CheckedRequest
from trunkattn.engine.config import EngineConfig
from trunkattn.engine.engine import Engine
from trunkattn.engine.memory import check_memory, no_room, size_cache
from trunkattn.engine.model.inspection import inspect_model
from trunkattn.engine.model.loading import eos_token_ids, load_model, load_tokenizer
from trunkattn.engine.outputs import RequestOutput
from trunkattn.engine.prompts import (
    ChatOptions,
    Message,
    Prompt,
    check_list,
    fill_template,
    is_single,
    tokenize_prompt,
)
from trunkattn.engine.sampling_params import SamplingParams, default_sampling_params
from trunkattn.engine.scheduling.scheduler import Scheduler
from trunkattn.engine.shared_engine import PreparedRequest, SharedEngine
from trunkattn.engine.stats import EngineStats
from trunkattn.engine.token_rules import ModelLimits
from trunkattn.kv_cache.manager import CacheManager
from trunkattn.memory import memory_for


class LLM:
    """A local language model that answers many prompts at once and reads each shared prefix once per step.

    Several threads may use one `LLM`: their prompts run in the same steps. Who adds requests to `engine` also steps it,
    and nothing else uses the `LLM` until they have finished: what the steps of `generate`, `chat` and `stream` compute
    for such requests is given to nobody.

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

    @torch.inference_mode(False)  # what it keeps is written to inside and outside of it
    def __init__(self, model: str | Path, **options: Any) -> None:
        known = [option.name for option in fields(EngineConfig)]
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"{name}={value!r}: there is no such option; expected one of {', '.join(known)}")
        self.config = config = EngineConfig(**options)
        info = inspect_model(
            model,
            dtype=config.dtype_name,
            device=config.device,
            load_format=config.load_format,
            trust_remote_code=config.trust_remote_code,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        attention_config(info, config)
        size_cache(info, config)
        check_memory(info)
        self.info = info
        self.tokenizer = load_tokenizer(info.files)
        with memory_for(lambda asked: no_room(info, config, asked)):
            self.model = load_model(info, config.quantization)
            num_pages, max_model_len = size_cache(info, config, self.model)
            self.kv_cache = make_cache(info, config.page_size, num_pages)
            self._runner = make_runner(self.model, info, config, self.kv_cache, max_model_len)
            if info.device.type == "cuda":
                self._runner.warm_up([1])  # compiles kernels, and shows whether the model can be captured
        scheduler = Scheduler(
            CacheManager(num_pages, config.page_size, config.enable_prefix_caching),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            policy=config.scheduler_policy,
            keys_per_token=keys_per_token(info),
            max_step_seconds=config.max_step_seconds,
        )
        eos = eos_token_ids(self.model.generation_config, self.tokenizer, info.config)
        limits = ModelLimits(info.vocab_size, max_model_len, eos)
        limited = ThreadLimit().applied if info.device.type == "cpu" else nullcontext
        self.engine = Engine(self._runner, scheduler, limits, self.tokenizer, config.seed, limited)
        self._shared = SharedEngine(self.engine)

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickles: the threads that use an LLM, its cache and its kernels belong to one process."""
        raise TypeError(
            "an LLM is copied or pickled: expected one for each process, so pass the model's path and options, and "
            "make the LLM where it answers"
        )

    def warm_up(self) -> None:
        """Compiles the planner and every kernel, captures every CUDA graph and reads the vocabulary for structured
        outputs, so that no later request has to.

        Without graphs it compiles only the planner and, on a CPU, the sampler. Call it while no request is unfinished.
        """
        with self._shared.turn:
            self._runner.warm_up()
            if self.info.device.type == "cpu":
                compile_truncation()
            self.engine.token_rules.structured_outputs.warm_up()

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
            sampling_params: one for all prompts, or one for each; None: `get_default_sampling_params()`.
            use_tqdm: show a progress bar.

        Returns:
            One output per prompt, in their order.

        Raises:
            TypeError, ValueError: naming the bad prompt or parameter. No prompt of this call has started then.
        """
        prepared = self._prepare(prompts, sampling_params)
        results: dict[int, RequestOutput] = {}
        progress = logging.tqdm(total=len(prepared), desc="Requests", disable=not use_tqdm)
        with progress, closing(self._shared.run(prepared)) as run:
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
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, whose prompts the tokenizer's chat template makes.

        Args:
            messages: a list of messages, or a list of such lists. A message is a mapping with "role", usually
                "content", a text or a list of parts {"type": "text", "text": ...}, and any other key that the template
                reads.
            sampling_params, use_tqdm: see `generate`.
            add_generation_prompt, continue_final_message, tools, chat_template_kwargs: see `ChatOptions`.

        Returns:
            One output per conversation, in their order.

        Raises:
            TypeError, ValueError: naming the bad message or parameter, or the model has no chat template.

        Example:
            >>> half = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The "}]
            >>> llm.chat(half, add_generation_prompt=False, continue_final_message=True)  # doctest: +SKIP
        """
        options = ChatOptions(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        check_list("messages", messages)
        single = isinstance(messages[0], Mapping)
        conversations = {"messages": messages} if single else {f"messages[{i}]": it for i, it in enumerate(messages)}
        prompts = [fill_template(self.tokenizer, chat, options, name) for name, chat in conversations.items()]
        return self.generate(prompts, sampling_params, use_tqdm)

    def render_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids of one conversation's prompt.

        Args:
            messages: see `chat`.
            options: fields of `ChatOptions`.

        Raises:
            TypeError, ValueError: see `chat`.
        """
        return fill_template(self.tokenizer, messages, ChatOptions(**options))

    def get_tokenizer(self) -> Any | None:
        """The model's transformers tokenizer; None if its folder has none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate`, `chat` and `stream` use without `sampling_params`: vLLM's choice of the model's
        generation_config.json (temperature, top_k, top_p, min_p, repetition_penalty, and max_new_tokens as max_tokens),
        or the keys general.sampling of its GGUF file, and for the rest the defaults of `SamplingParams`."""
        return default_sampling_params(self.model.generation_config)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix: later requests compute their prompts from the first token."""
        with self._shared.turn:
            self.engine.reset_prefix_cache()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Answers prompts and yields (position of the prompt, its output so far) whenever a prompt gets a token.

        The arguments are checked now; the computation starts with the first item. To close the iterator aborts its
        unfinished prompts. Several iterators and `generate` may be used in turn, or by several threads: they share the
        engine's steps.

        Args:
            prompts, sampling_params: see `generate`.

        Raises:
            TypeError, ValueError: see `generate`.

        Example:
            >>> for position, output in llm.stream(["Hello", "Goodbye"]):  # doctest: +SKIP
            ...     print(position, output.outputs[0].text)
        """
        return self._shared.run(self._prepare(prompts, sampling_params))

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[PreparedRequest]:
        """Tokenises and checks every prompt, so that a bad one stops the call before any has started."""
        if not isinstance(prompts, str | Mapping | Sequence) or isinstance(prompts, bytes | bytearray):
            raise TypeError(f"prompts={prompts!r}: expected one prompt or a list of prompts")
        single = is_single(prompts)
        each: Sequence[Any] = [prompts] if single else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.get_default_sampling_params()] * len(each)
        elif isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            raise TypeError(f"sampling_params={sampling_params!r}: expected SamplingParams or a list of them")
        if len(params) != len(each):
            raise ValueError(f"sampling_params has {len(params)} items: expected one for each of {len(each)} prompts")
        prepared: list[PreparedRequest] = []
        known: CheckedRequest | None = None  # the newest one: prompts often share their parameters
        for position, (prompt, one) in enumerate(zip(each, params, strict=True)):
            name = f"prompts[{position}]"
            if not isinstance(one, SamplingParams):
                raise TypeError(f"sampling_params[{position}]={one!r}: expected SamplingParams")
            text, token_ids = tokenize_prompt(self.tokenizer, prompt, name)
            rules = known.rules if known is not None and known.params is one else None
            known = self.engine.check_request(token_ids, one, name, rules)
            prepared.append(PreparedRequest(text, known))
        return prepared
