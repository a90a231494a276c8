"""`outrider serve`: load the target and the drafter, and answer requests until a signal."""

import errno
import importlib.util
import socket
from contextlib import closing

from rich.text import Text

from outrider.conf.command_settings import LOCAL_HOSTS, SERVE_NOTE, ServeConfig
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.garbage import exempt_objects
from outrider.conf.packages import install_command
from outrider.conf.schema import Config
from outrider.data.reporter import Reporter
from outrider.eval.auto_policy import policy_beside
from outrider.eval.decoder import Decoder
from outrider.eval.open_drafter import find_drafter, require_single_process
from outrider.eval.rank_tables import tables_of
from outrider.models.adapt import adapt
from outrider.models.decode.from_config import depth_warning
from outrider.models.decode.policy import Policy
from outrider.models.decode.rules.rule_table import RULES

BACKLOG = 512


def serve(config: Config, options: ServeConfig, console: Console | None = None) -> int:
    """Run `outrider serve`.

    Raises:
        RunError, ConfigError: the address is in use, a library is missing, or the drafter does not
            support `config.decode`.
    """
    require_single_process("serve")
    check_libraries()
    from outrider.eval.serve.server import Server

    console = console or Console()
    with closing(listen(options)) as listener:
        if config.eval.drafter is None:  # a published one may end drafts earlier: `depth_warning`
            config = adapt(config, Reporter(console).note)
        folder = find_drafter(config)
        tables = tables_of(folder, config.drafter)
        policy = policy_beside(config.decode, folder, tables)
        decoder = Decoder.from_config(config, policy)
        exempt_objects()
        tokens = config.eval.max_new_tokens
        server = Server(decoder, config.decode, options, listener, console, tokens, tables)
        _print_notes(console, decoder, policy, config)
        server.prepare()
        if options.host not in LOCAL_HOSTS and server.service.key is None:
            why = "other machines can reach this address without a key"
            console.print(Text(why, "yellow"))
        drafter = config.eval.drafter or config.drafter.name
        console.print(f"{server.service.model} with {drafter} at {server.url}")
        with server.stopped_by_signals():
            server.run()
    console.print(Text("stopped", "dim"))
    return 0


def listen(options: ServeConfig) -> socket.socket:
    """Return a socket that listens at the address.

    Raises:
        ConfigError: the port is in use, or the address is not one of this machine.
    """
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why, fix = f"This address is not found: {error}.", "Use 127.0.0.1 or 0.0.0.0."
        raise ConfigError("serve.host", options.host, why, fix) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = f"{error.strerror}."
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("serve.host", options.host, why, "Use 127.0.0.1.") from None
        fix = "Choose another port, as in port=8001; port=0 takes a free one."
        raise ConfigError("serve.port", options.port, why, fix) from None
    return listener


def check_libraries() -> None:
    """Raise a RunError that names the extra if the HTTP libraries are not installed."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            message = f"serve needs the package {package}, which is not installed."
            raise RunError(message, f"Install it: {install_command(package)}")


def _print_notes(console: Console, decoder: Decoder, policy: Policy, config: Config) -> None:
    console.print(Text(SERVE_NOTE, "dim"))
    assert decoder.drafter is not None, "from_config loads one"
    rule = RULES.get(config.decode.verify)
    lossy = "" if rule is None or not rule.lossy else f"{config.decode.verify}: lossy"
    for warning in (decoder.changed, depth_warning(policy, decoder.drafter), lossy):
        if warning:
            console.print(Text(warning, "yellow"))
