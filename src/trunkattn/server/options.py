"""The server's options. They check themselves."""

import re
from dataclasses import dataclass
from typing import Final

from trunkattn.server.limits import LIMITS
from trunkattn.server.tool_calls import TOOL_CALL_PARSERS
from trunkattn.validate import check_bool, check_real, check_text, keep_int, shown

# What a browser sends in the header Origin: a scheme and a host, a port perhaps, and no path.
_ORIGIN: Final = re.compile(r"null|\*|[a-z][a-z0-9+.-]*://[^\s/?#]+")
_BRACKETED: Final = re.compile(r"\[([^\[\]]*:[^\[\]]*)\]")  # an address of IPv6 in a URL
_KEY: Final = re.compile(r"[!-~]+")  # what a header can hold
# A name or an address, without a port: an address of IPv6 has two colons at least, and perhaps a zone.
_HOST: Final = re.compile(r"[^\s/?#@:]+|(?=.*:.*:)[0-9a-f:.]+(?:%[^\s/]+)?", re.IGNORECASE)


@dataclass(frozen=True)
class ServerOptions:
    """Options of the HTTP server.

    Attributes:
        served_model_name: what `/v1/models` calls the model, and what requests must ask for; at most 512 characters.
        host, port: where it listens. By default it listens only on this machine. An address of IPv6 may have brackets,
            as in a URL.
        api_keys: with any, a request must carry one of them as a bearer token. Each key is a tenant of its own: no
            tenant can find out, by time, which prefixes another one's requests have cached.
        allowed_hosts: names by which clients may call the server, beside its addresses, localhost and `host`; "*": any.
            A name that is not among them may be one that a web page has pointed at this machine.
        allowed_origins: web pages of these origins may call the server from a browser (CORS); "*": any.
        max_waiting: requests that may wait for their first token. One more is answered with 429.
        max_body_bytes: most bytes of a request's body.
        max_answers: most answers (`n`, times the prompts) of one request.
        max_prompt_tokens: most tokens of a prompt; None: the model's limit.
        max_answer_tokens: most tokens of an answer (`max_tokens`); None: the model's limit.
        shutdown_seconds: after SIGTERM, SIGINT or SIGHUP, how long running answers may take to end.
        timeout_keep_alive: seconds that a connection stays open between two requests. Most proxies keep theirs for a
            minute, and the side that sends should be the first to close, or a request meets a connection that is about
            to end.
        tool_call_parser: how the model writes tool calls.
        strict_requests: refuse every field that does not exist. Otherwise only those that look like a misspelt one are
            refused, and others are ignored.

    Raises:
        TypeError, ValueError: naming the option, its value and what is expected.
    """

    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_waiting: int = 1024
    max_body_bytes: int = 16 << 20
    max_answers: int = 128
    max_prompt_tokens: int | None = None
    max_answer_tokens: int | None = None
    shutdown_seconds: float = 30.0
    timeout_keep_alive: float = 75.0
    tool_call_parser: str = "hermes"
    strict_requests: bool = False

    def __post_init__(self) -> None:
        if not self.served_model_name:
            raise ValueError(f"served_model_name={self.served_model_name!r}: expected a name that is not empty")
        check_text("served_model_name", self.served_model_name)
        if len(self.served_model_name) > LIMITS.label:  # requests name the model
            value = shown(self.served_model_name)
            raise ValueError(f"served_model_name={value}: expected at most {LIMITS.label} characters")
        if not self.host:  # which would be every address of the machine
            raise ValueError("host='': expected an address or a name, such as 127.0.0.1, or 0.0.0.0 for all addresses")
        object.__setattr__(self, "host", _without_brackets(self.host))
        if not _HOST.fullmatch(self.host):
            expected = "an address or a name without a scheme, a port (give that with --port) or a path"
            raise ValueError(f"host={self.host!r}: expected {expected}, such as 127.0.0.1")
        keep_int(self, "port", 0, 65535)
        for name in ("max_waiting", "max_body_bytes", "max_answers"):
            keep_int(self, name, 1)
        for name in ("max_prompt_tokens", "max_answer_tokens"):
            if getattr(self, name) is not None:
                keep_int(self, name, 1)
        if check_real("shutdown_seconds", self.shutdown_seconds, "a number of seconds >= 0") < 0:
            raise ValueError(f"shutdown_seconds={self.shutdown_seconds!r}: expected a number of seconds >= 0")
        if check_real("timeout_keep_alive", self.timeout_keep_alive, "a number of seconds > 0") <= 0:
            raise ValueError(f"timeout_keep_alive={self.timeout_keep_alive!r}: expected a number of seconds > 0")
        for key in self.api_keys:
            if not _KEY.fullmatch(key):
                raise ValueError("api_key: expected visible ASCII characters without spaces, and at least one")
        object.__setattr__(self, "allowed_hosts", tuple(map(_without_brackets, self.allowed_hosts)))
        self._keep("allowed_hosts", _HOST, "a name without a scheme, a port or a path, such as llm.example")
        self._keep("allowed_origins", _ORIGIN, "a scheme and a host without a path, such as https://llm.example, or *")
        check_bool("strict_requests", self.strict_requests)
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            names = ", ".join(TOOL_CALL_PARSERS)
            raise ValueError(f"tool_call_parser={self.tool_call_parser!r}: expected one of {names}")

    def _keep(self, name: str, form: re.Pattern[str], expected: str) -> None:
        """Checks names that requests are compared with, and keeps them as browsers write them: in lower case."""
        names = tuple(each.lower() for each in getattr(self, name))
        for each in names:
            if not form.fullmatch(each):
                raise ValueError(f"{name.removesuffix('s')}={each!r}: expected {expected}")
        object.__setattr__(self, name, names)


def _without_brackets(host: str) -> str:
    """An address of IPv6 without the brackets that it has in a URL; another host as it is."""
    bracketed = _BRACKETED.fullmatch(host)
    return bracketed[1] if bracketed else host
