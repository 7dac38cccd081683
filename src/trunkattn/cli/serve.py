"""`trunkattn serve`: the model behind HTTP until SIGTERM, SIGINT or SIGHUP."""

import contextlib
import errno
import gc
import io
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import typer

from trunkattn.cli.log import queued_stderr
from trunkattn.cli.models import name_of, place, use_threads
from trunkattn.cli.options.engine import ServeOptions
from trunkattn.cli.options.from_dataclass import fields_of, reported_by_option
from trunkattn.engine import EngineConfig
from trunkattn.engine.model.path import existing_path
from trunkattn.interrupts import ends_at_once, importing, usual_signals
from trunkattn.server import ServerOptions

if TYPE_CHECKING:
    from trunkattn.engine import LLM

_LOG: Final = logging.getLogger(__name__)
_KEY_VARIABLE: Final = "TRUNKATTN_API_KEY"
# With these, prometheus_client keeps counts in files that several processes share, and goes on where a process of the
# same number has ended. The folder may be another program's, or gone.
_SHARED_METRICS: Final = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
# How long another thread may hold Python's lock while the engine waits for it. The engine releases the lock in every
# operation of torch, so with Python's default one busy thread makes a step many times as long.
_SWITCH_SECONDS: Final = 0.0001


def run_serve(options: ServeOptions) -> None:
    """Checks the options, takes the port, loads the model, and serves it. torch is loaded after the checks."""
    with reported_by_option(ServeOptions):
        existing_path(options.model)
        given = fields_of(ServerOptions, options)
        if options.served_model_name is None:
            given["served_model_name"] = name_of(options.model)
        given["api_keys"] = tuple(options.api_key or ())
        if not given["api_keys"] and _KEY_VARIABLE in os.environ:
            raise ValueError(f"api_key: {_KEY_VARIABLE} is set and has no key: expected a key; unset it to need none")
        given["allowed_hosts"] = tuple(options.allowed_host or ())
        given["allowed_origins"] = tuple(options.allowed_origin or ())
        server = ServerOptions(**given)
        config = EngineConfig(**fields_of(EngineConfig, options))
    sys.setswitchinterval(_SWITCH_SECONDS)
    level = "WARNING" if options.quiet else "INFO"
    for name in _SHARED_METRICS:
        os.environ.pop(name, None)
    with queued_stderr() as log, _bound(server) as listener:
        logging.basicConfig(level=level, format="%(levelname)s:     %(message)s", handlers=[log])
        logging.getLogger("gguf").setLevel(logging.WARNING)  # it names the temporary files of a conversion
        with importing():
            from trunkattn.server import AppServer, create_app

        app = create_app(_load(options, config), server)
        _listen(listener, server)
        host, port = listener.getsockname()[:2]
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        _LOG.info("Serving %s at %s, where its live page is too.", server.served_model_name, where)
        usual_signals()  # uvicorn handles them, and raises them again when the answers have ended
        try:
            seconds = server.shutdown_seconds, server.timeout_keep_alive
            AppServer(app, *seconds, log_level=level.lower(), log_config=None).run([listener])
        finally:
            gc.unfreeze()  # libraries that Python ends call what stays alive a leak


def _bound(server: ServerOptions) -> socket.socket:
    """A socket that is bound to the port, before the model is loaded, which may take minutes. It does not listen yet,
    so that the server does not seem ready."""
    with _reported(server):
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # SO_REUSEADDR is needed if connections of an earlier server are still closing. It is unset afterwards,
            # because two sockets that have it and do not listen may share a port.
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            listener.close()
            raise
    return listener


def _listen(listener: socket.socket, server: ServerOptions) -> None:
    """Begins to take connections. With SO_REUSEADDR the next server can take the port while the last of them close."""
    with _reported(server):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen()


@contextlib.contextmanager
def _reported(server: ServerOptions) -> Iterator[None]:
    """Context in which an error of a socket becomes one of the option that caused it."""
    try:
        yield
    except UnicodeError as error:
        message = f"{server.host}: no machine can have this name; choose another one"
        raise typer.BadParameter(message, param_hint="--host") from error
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        reason = "another program uses it" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
        hint, value = ("--port", server.port) if is_port else ("--host", server.host)
        raise typer.BadParameter(f"{value}: {reason}; choose another one", param_hint=hint) from error


def _load(options: ServeOptions, config: EngineConfig) -> "LLM":
    """Loads the model and makes it ready for its first step. The progress bars of other libraries are hidden, because
    they would fail if the disk of the log is full. Log lines do not."""
    _LOG.info("Loading %s. The first time, this compiles kernels too.", name_of(options.model))
    with reported_by_option(ServeOptions), contextlib.redirect_stderr(io.StringIO()):
        with importing():
            from trunkattn.engine import LLM

        use_threads(options.threads)
        with ends_at_once():
            llm = LLM(options.model, **vars(config))
            llm.warm_up()
    # Garbage collection stops every thread. All objects so far stay alive, so it need not visit them again.
    gc.collect()
    gc.freeze()
    _LOG.info("%s runs on %s.", name_of(options.model), place(llm))
    return llm
