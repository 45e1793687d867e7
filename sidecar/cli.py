"""The command line: flags -> settings -> one of the commands."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

import uvloop

from sidecar import __version__, compat, config, log, tls, top
from sidecar.assembly import Sidecar
from sidecar.control import Control
from sidecar.settings import Settings

_log = logging.getLogger("sidecar")


def main(argv: Sequence[str] | None = None) -> int:
    """`pd-sidecar`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pd-sidecar", description="Prefill/decode routing sidecar for vLLM.")
    parser.add_argument("--version", action="version", version=f"pd-sidecar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    environment = "Every flag can also be set as PD_SIDECAR_<FLAG> in the environment or in the --config file."
    for name, text in (
        ("serve", "run the sidecar"),
        ("check-config", "print the effective configuration, or one line for each mistake"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text}. {environment}", add_help=False)
        command.add_argument("-h", "--help", action="help", help="show this text")
        config.add_flags(command)
    commands.add_parser("replay", help="what other rules would have made of recorded decisions", add_help=False)
    command = commands.add_parser("top", help="watch a running sidecar in the terminal")
    top.add_arguments(command)
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        argv.insert(0, "serve")  # as the image that this one replaces is started
    if argv[:1] == ["replay"]:
        from sidecar import replay

        return replay.main(argv[1:])
    if not argv or argv[0] not in commands.choices or {"-h", "--help"} & set(argv[1:]):
        parser.parse_args(argv)
    if argv[0] == "top":
        from sidecar.top import terminal

        wanted = parser.parse_args(argv)
        return terminal.main(wanted.url, once=wanted.once, token_file=wanted.token_file)
    command_name = argv[0]
    flags, notes = compat.translated(argv[1:])
    try:
        settings, path = config.load(flags)
        mistakes = [problem] if (problem := tls.problem(settings)) else []
    except config.BadSettings as error:
        mistakes = error.mistakes
    if command_name == "check-config":
        for note in notes:  # also where something is wrong: they are about other flags
            print(f"pd-sidecar: warning: {note}", file=sys.stderr)  # noqa: T201
    if mistakes:
        for mistake in mistakes:
            print(f"pd-sidecar: {mistake}", file=sys.stderr)  # noqa: T201
        return 2
    doubts = config.doubts(settings)
    if command_name == "check-config":
        import yaml

        from sidecar.prefill.discovery.make import doubts as discovery_doubts

        for doubt in (*doubts, *discovery_doubts(settings)):  # running, discovery says so itself
            print(f"pd-sidecar: warning: {doubt}", file=sys.stderr)  # noqa: T201
        sys.stdout.write(yaml.safe_dump(config.shown(settings), sort_keys=False))
        return 0
    log.configure(settings.log_format, settings.log_level)
    for note in (*notes, *doubts):
        _log.warning("%s", note)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, path, flags))


def _made(settings: Settings, flags: Sequence[str]) -> Control:
    """Raises `tls.BadTls`."""
    if settings.workers == 1:
        return Sidecar(settings, flags)
    from sidecar.workers.hub import Hub

    return Hub(settings, flags)


async def _serve(settings: Settings, path: object, flags: Sequence[str]) -> int:
    try:
        sidecar = _made(settings, flags)
    except tls.BadTls as error:  # a file has changed since it was checked
        _log.error("cannot start: %s", error)
        return 2
    try:
        await sidecar.start()
    except OSError as error:
        _log.error("cannot start: %s", error.strerror or error)
        await sidecar.close()
        return 2
    return await sidecar.run()
