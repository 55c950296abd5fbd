"""The command line as a whole: registers the verbs, turns every error into an exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from sparsify import settings
from sparsify.cli import (
    bench,
    compare,
    doctor,
    estimate,
    gpus,
    inspect,
    plan,
    policy,
    rewrite,
    stopping,
    streams,
    verify,
)
from sparsify.errors import SparsifyError
from sparsify.versions import VERSION

__all__ = ["execute"]

INTERNAL, USAGE, INTERRUPTED = 1, 2, 130

# Typer brings its own copy of click, or uses the installed one, depending on its version.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="sparsify",
    help="Sparse-attention compiler: proves what each attention computes, then rewrites it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("estimate")(estimate.estimate)
app.command("compare")(compare.compare)
app.command("rewrite")(rewrite.rewrite)
app.command("verify")(verify.verify)
app.command("bench")(bench.bench)
app.command("gpus")(gpus.gpus)
app.command("doctor")(doctor.doctor)
app.add_typer(policy.app, name="policy")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"sparsify {VERSION}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def execute(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; whatever fails is told in a sentence on stderr."""
    try:
        with streams.working():
            _set_up_logging()
            code = app(args=list(arguments), prog_name="sparsify", standalone_mode=False)
            sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except SparsifyError as error:
        return _fail(str(error), error.exit_code)
    except _ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return USAGE
        return _fail(error.format_message().replace(": Value error, ", ": "), USAGE)
    except BrokenPipeError:
        streams.forget_stdout()
        return 128 + 13  # as a process that SIGPIPE ended
    except Exception as error:
        text = " ".join(str(error).split())[:500] or "no message"
        return _fail(
            f"internal error: {type(error).__name__}: {text}; "
            "run with SPARSIFY_LOG_LEVEL=DEBUG for the traceback",
            INTERNAL,
        )
    if code == INTERRUPTED:  # typer makes this of KeyboardInterrupt
        return _interrupted()
    return code if isinstance(code, int) else 0


def _interrupted() -> int:
    _show_traceback()
    return stopping.tell()


def _fail(text: str, code: int) -> int:
    _show_traceback()
    streams.tell(f"sparsify: {text}")
    return code


def _show_traceback() -> None:
    if sys.exc_info()[0] is not None and logging.getLogger("sparsify").isEnabledFor(logging.DEBUG):
        traceback.print_exc()


class _Stderr(logging.Handler):
    """Records go where stderr is at that moment (a progress bar replaces it for a while)."""

    def emit(self, record: logging.LogRecord) -> None:
        streams.tell(f"sparsify: {record.levelname}: {record.getMessage()}")


def _set_up_logging() -> None:
    """Logs of this package to stderr; no downloads, and no progress bars but our own."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        os.environ[name] = "1"
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    level = logging.getLevelNamesMapping().get(settings.log_level())
    logger = logging.getLogger("sparsify")
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())
    logger.setLevel(logging.WARNING if level is None else level)
    if level is None:
        logger.warning(
            "SPARSIFY_LOG_LEVEL is %r, which is no level; WARNING is used", settings.log_level()
        )
