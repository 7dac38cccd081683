"""Texts and conversations of requests to token ids, and token ids to text."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from trunkattn.engine.answers.token_bytes import TokenBytes, special_ids
from trunkattn.engine.llm import LLM
from trunkattn.engine.prompts import ChatOptions, own_variables, render_template, unread_variables
from trunkattn.server.bodies.body import LONGEST_NAME, closest
from trunkattn.server.errors import TOO_LONG, BadRequest, bad_request
from trunkattn.server.lanes import Lanes, Pause
from trunkattn.server.limits import LIMITS
from trunkattn.server.options import ServerOptions
from trunkattn.server.prompts.conversation import Conversation
from trunkattn.server.prompts.template_clock import template_clock
from trunkattn.validate import check_text

_LOG: Final = logging.getLogger(__name__)
_SLICE: Final = 100_000  # characters of a text that are counted at a time
_SEAM: Final = 64  # tokens that a cut may add


class Tokenization:
    """The model's tokenizer, as the endpoints use it.

    Args:
        llm: the model.
        options: how long a prompt may be, and whether requests are strict.
        lanes: the threads that read and write texts.
    """

    def __init__(self, llm: LLM, options: ServerOptions, lanes: Lanes) -> None:
        self._llm, self._options, self._lanes = llm, options, lanes
        self.special_ids = special_ids(llm.tokenizer)
        self.token_bytes = TokenBytes(llm.tokenizer)
        vocabulary = {} if llm.tokenizer is None else llm.tokenizer.get_vocab()
        self._most_tokens = options.max_prompt_tokens or llm.engine.limits.max_model_len
        self._most_characters = self._most_tokens * max(map(len, vocabulary), default=1)

    def special_ids_of(self, marks: Sequence[str]) -> tuple[int, ...]:
        """The special tokens among marks; the others are text anyway."""
        found = (self._tokenizer().convert_tokens_to_ids(mark) for mark in marks)
        return tuple(token_id for token_id in found if token_id in self.special_ids)

    async def tokens(self, text: str, name: str, add_special_tokens: bool = True, truncates: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: the text.
            name: what messages call it.
            add_special_tokens: whether the tokenizer adds those that it has for a text, such as one that begins it.
            truncates: the text may have more tokens than a prompt, because only its end is kept.

        Raises:
            BadRequest: it has too many tokens, or is no Unicode text.
        """
        if len(text) > self._most_characters:  # whatever its tokens are; the tokenizer would spend seconds on them
            raise self._too_long(name, f"{len(text)} characters", self._most_characters)
        return await self._lanes.run(len(text), lambda _: self._encode(text, name, add_special_tokens, truncates))

    async def chat_tokens(
        self, conversation: Conversation, num_bytes: int, truncates: bool = False, tools_may_be_hidden: bool = False
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template.

        Args:
            conversation: what the template reads.
            num_bytes: the size of the body that holds the conversation.
            truncates: see `tokens`.
            tools_may_be_hidden: see `render_template`.

        Raises:
            BadRequest: the template refuses the conversation, or its text has too many tokens.
        """

        def render(pause: Pause) -> str:
            conversation.check_arguments(pause)
            with bad_request():
                messages = conversation.as_read(pause)
                chat = self._readable(conversation.options())
                with template_clock(LIMITS.template_seconds, pause):
                    return render_template(self._llm.tokenizer, messages, chat, tools_may_be_hidden=tools_may_be_hidden)

        text = await self._lanes.run(num_bytes, render)
        return await self.tokens(text, "messages", add_special_tokens=False, truncates=truncates)

    async def text(self, token_ids: list[int]) -> str:
        """The text of token ids. Raises BadRequest if they are too many, or one is no token."""
        most, longest = self._llm.info.vocab_size - 1, self._llm.engine.limits.max_model_len
        if len(token_ids) > longest:
            raise BadRequest(f"tokens has {len(token_ids)} items: expected at most {longest}", "tokens")
        tokenizer = self._tokenizer()

        def decode(_: Pause) -> str:
            for token_id in token_ids:
                if not 0 <= token_id <= most:
                    raise BadRequest(f"tokens: token id {token_id}: expected 0 to {most}", "tokens")
            return str(tokenizer.decode(token_ids))

        return await self._lanes.run(len(token_ids), decode)

    def check_length(self, name: str, num_tokens: int) -> None:
        """Raises BadRequest if a prompt, which messages call `name`, has more tokens than the operator allows."""
        most = self._options.max_prompt_tokens
        if most is not None and num_tokens > most:
            raise self._too_long(name, f"{num_tokens} tokens", most)

    def _readable(self, chat: ChatOptions) -> ChatOptions:
        """The options without the variables that the template does not read and that look like another template's.
        These go into the log. Strict requests keep them, and `render_template` refuses them."""
        tokenizer = self._llm.tokenizer
        unread = [] if tokenizer is None else unread_variables(tokenizer, chat)
        if self._options.strict_requests or not unread:
            return chat
        if len(unread) > LIMITS.unknown:  # each is compared with all that the template reads
            message = f"chat_template_kwargs names {len(unread)} variables that the model's chat template never reads"
            raise BadRequest(f"{message}: expected at most {LIMITS.unknown}", "chat_template_kwargs")
        known = own_variables(tokenizer, chat)
        foreign = {name for name in unread if closest(name, known) is None}
        if foreign:
            names = ", ".join(sorted(repr(name[:LONGEST_NAME]) for name in foreign))
            _LOG.info("Ignored variables that the chat template does not read: %s", names)
        kept = {name: value for name, value in (chat.chat_template_kwargs or {}).items() if name not in foreign}
        return replace(chat, chat_template_kwargs=kept)

    def _tokenizer(self) -> Any:
        if self._llm.tokenizer is None:
            raise BadRequest("prompt: expected token ids, because the model has no tokenizer", "prompt")
        return self._llm.tokenizer

    def _encode(self, text: str, name: str, add_special_tokens: bool, truncates: bool) -> list[int]:
        """Token ids of a text. One that has too many is not read to its end. On a lane."""
        tokenizer = self._tokenizer()
        with bad_request():
            check_text(name, text)
        count = 0
        for start in range(0, 0 if truncates else len(text) - _SLICE, _SLICE):
            count += len(tokenizer(text[start : start + _SLICE], add_special_tokens=False)["input_ids"]) - _SEAM
            if count > self._most_tokens:
                raise self._too_long(name, f"over {count} tokens", self._most_tokens)
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _too_long(self, name: str, size: str, most: int) -> BadRequest:
        """The error of a prompt, in words that clients look for."""
        words = f"because this model's maximum context length is {self._most_tokens} tokens here; shorten it"
        return BadRequest(f"{name} has {size}: expected at most {most}, {words}", name, code=TOO_LONG)
