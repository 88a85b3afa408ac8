"""The `dsv4dist` command: which commands there are, how they end, and what people see when they fail.

Exit codes: 0 done; 1 the work failed; 2 wrong usage; 128 + N ended by signal N."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.main import get_command

from dsv4dist.cli import bench, compile, generate, info, make_checkpoint, plan, score, smoke
from dsv4dist.cli.options import OptionError
from dsv4dist.cli.output import complain, prepare_standard_streams
from dsv4dist.cli.signals import Interrupted, received_signal, signals_raise
from dsv4dist.env import DEBUG_SWITCH, debug_wanted
from dsv4dist.errors import Dsv4Error

app = typer.Typer(
    name="dsv4dist",
    help="DeepSeek-V4 on several GPUs: tensor-parallel ranks as Ray actors.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long option names off
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate", help=generate.__doc__)(generate.command)
app.command("score", help=score.__doc__)(score.command)
app.command("make-checkpoint", help=make_checkpoint.__doc__)(make_checkpoint.command)
app.command("info", help=info.__doc__)(info.command)
app.command("compile", help=compile.__doc__)(compile.command)
app.command("plan", help=plan.__doc__)(plan.command)
app.command("smoke", help=smoke.__doc__)(smoke.command)
app.add_typer(bench.app, name="bench")

# Releases of typer differ in where they keep this class; the public BadParameter derives from it in all of them.
_ClickException = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")


def _show_version(wanted: bool) -> None:
    if wanted:
        from dsv4dist import __version__

        print(f"dsv4dist {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if debug_wanted():
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("dsv4dist").setLevel(logging.DEBUG)
    else:
        logging.basicConfig(format="dsv4dist: %(message)s", level=logging.WARNING)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; every failure is one line on standard error, without a traceback."""
    try:
        with signals_raise():
            result = get_command(app).main(args=arguments or ["--help"], prog_name="dsv4dist", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except Interrupted as interrupt:
        return _interrupted(interrupt.signum)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's way to end then, without a word
            complain("error: standard output was closed before everything was written; results up to here are kept")
            return 1
        # Ray, while it starts, answers SIGTERM by sys.exit(SIGTERM).
        return _interrupted(signal.SIGTERM) if end.code == signal.SIGTERM else _code(end.code)
    except Exception as error:
        signum = received_signal()
        if signum is not None:  # compiled code makes a SystemError of it, a half done import others
            return _interrupted(signum)
        if debug_wanted():
            traceback.print_exc()
        text, code = _describe(error, arguments)
        complain(f"error: {text}")
        return code


def _interrupted(signum: int) -> int:
    complain(f"interrupted by {signal.Signals(signum).name}; results up to here are kept")
    return 128 + signum


def _code(code: object) -> int:
    return code if isinstance(code, int) else int(code is not None)


def _describe(error: Exception, arguments: list[str]) -> tuple[str, int]:
    """What to tell the user about an exception, and the exit code."""
    if isinstance(error, _ClickException):
        return _describe_usage(error, arguments), 2
    if isinstance(error, Dsv4Error):
        # A message that starts with an option's name is about that option, whoever raised it.
        return str(error), 2 if isinstance(error, OptionError) or str(error).startswith("--") else 1
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror, 1
    if isinstance(error, MemoryError):
        return "this machine's memory is used up; lower --max-num-seqs, --max-model-len or the size of the input", 1
    return (
        f"unexpected {type(error).__name__}: {error}; this is a bug in dsv4dist: "
        f"set {DEBUG_SWITCH}=1 for the traceback and report it",
        1,
    )


def _describe_usage(error: Any, arguments: list[str]) -> str:
    """A usage error in typer's words, with the value that was found, which typer leaves out."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    message = error.format_message().rstrip(".")
    for flag in getattr(parameter, "opts", ()):
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
            if argument == flag or argument.startswith(flag + "="):
                message += f", found {following if argument == flag else argument.partition('=')[2]!r}"
    return f"{message}; see {context.command_path if context else 'dsv4dist'} --help"


def main() -> None:
    """Entry point of the `dsv4dist` executable."""
    prepare_standard_streams()
    code = run(sys.argv[1:])
    if code > 128:
        # Everything is ended by now. Ray's exit handlers would only look for processes that are gone, or abort.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # standard output may be closed
                stream.flush()
        os._exit(code)
    sys.exit(code)
