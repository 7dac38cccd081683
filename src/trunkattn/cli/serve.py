"""`trunkattn serve`: the model behind HTTP until SIGTERM or SIGINT."""

import contextlib
import errno
import gc
import io
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, Final

import typer

from trunkattn.cli.command import fields_of, reported_by_option
from trunkattn.cli.models import place, use_threads
from trunkattn.cli.options import ServeOptions
from trunkattn.engine import EngineConfig
from trunkattn.engine.model_path import existing_path
from trunkattn.server import ServerOptions

if TYPE_CHECKING:
    from trunkattn.engine import LLM

_LOG: Final = logging.getLogger(__name__)
_KEY_VARIABLE: Final = "TRUNKATTN_API_KEY"
# How long another thread may hold Python's lock while the engine waits for it. The engine releases the lock in every
# operation of torch, so with Python's default one busy thread makes a step many times as long.
_SWITCH_SECONDS: Final = 0.0005


def run_serve(options: ServeOptions) -> None:
    """Checks the options, takes the port, loads the model, and serves it. torch is loaded after the checks."""
    with reported_by_option(ServeOptions):
        existing_path(options.model)
        given = fields_of(ServerOptions, options)
        given["served_model_name"] = options.served_model_name or options.model.stem
        given["api_keys"] = tuple(options.api_key or ())
        if not given["api_keys"] and _KEY_VARIABLE in os.environ:
            raise ValueError(f"api_key: {_KEY_VARIABLE} is set and has no key: expected a key; unset it to need none")
        given["allowed_hosts"] = tuple(options.allowed_host or ())
        given["allowed_origins"] = tuple(options.allowed_origin or ())
        server = ServerOptions(**given)
        config = EngineConfig(**fields_of(EngineConfig, options))
    sys.setswitchinterval(_SWITCH_SECONDS)
    level = "WARNING" if options.quiet else "INFO"
    logging.basicConfig(level=level, format="%(levelname)s:     %(message)s", stream=sys.stderr)
    with _listening(server) as listener:
        from trunkattn.server import AppServer, create_app

        app = create_app(_load(options, config), server)
        host, port = listener.getsockname()[:2]
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        _LOG.info("Serving %s at %s, where its live page is too.", server.served_model_name, where)
        AppServer(app, server.shutdown_seconds, log_level=level.lower(), log_config=None).run([listener])


def _listening(server: ServerOptions) -> socket.socket:
    """The socket. It is taken before the model is loaded, which may last minutes."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
    except OSError as error:
        listener.close()
        reason = "another program uses it" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
        hint = "--host" if isinstance(error, socket.gaierror) else "--port"
        value = server.host if hint == "--host" else server.port
        raise typer.BadParameter(f"{value}: {reason}; choose another one", param_hint=hint) from error
    return listener


def _load(options: ServeOptions, config: EngineConfig) -> "LLM":
    """The model, ready for its first step. The progress bars of other libraries are hidden: they cannot be written
    where the disk of the log is full, and logging can do without."""
    _LOG.info("Loading %s. The first time, this compiles kernels too.", options.model.name)
    with reported_by_option(ServeOptions), contextlib.redirect_stderr(io.StringIO()):
        from trunkattn.engine import LLM

        use_threads(options.threads)
        llm = LLM(options.model, **vars(config))
        llm.warm_up()
    # Garbage collection stops every thread. Objects that are loaded by now stay alive, so they need no second look.
    gc.collect()
    gc.freeze()
    _LOG.info("%s runs on %s.", options.model.name, place(llm))
    return llm
