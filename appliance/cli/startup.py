"""What every long-running command does first: read settings, set up logging, and word what stops a start."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Literal, get_args

import click
import uvloop

from appliance import logs, tally
from appliance.catalog import Catalog
from appliance.errors import StartupError
from appliance.presets import load_facts, presets_dirs
from appliance.settings import Settings
from appliance.settings_source import load_settings, log_format_of

THREAD_TURN_S = 0.0005
GARBAGE_OBJECTS = 20_000  # made and not freed, before the collector looks at them
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: starting again will not help

config_option = click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="The configuration file to read."
)
Role = Literal["up", "gateway", "worker"]
role_option = click.option(
    "--role", type=click.Choice(get_args(Role)), default="up", help="What is to run here; `up` is everything."
)


@contextlib.contextmanager
def startup_errors() -> Iterator[None]:
    """Turn a StartupError, also one from within task groups, into its message and exit code 78."""
    try:
        yield
    except* StartupError as group:
        for error in _leaves(group):
            tell(f"appliance: {error}", is_error=True)
        sys.exit(EXIT_CONFIG)


def tell(text: str, *, is_error: bool = False) -> None:
    """Say something to a person, or to the collector where all lines are JSON."""
    if logs.are_json():
        logging.getLogger("appliance").log(logging.ERROR if is_error else logging.INFO, "%s", text)
    else:
        click.echo(text, err=is_error)


def prepare(config_file: Path | None, *, part: str) -> Settings:
    """Settings, with logging set up by them; what is wrong with them is told as the environment alone says."""
    logs.configure(level="info", format=log_format_of(os.environ), part=part)
    settings = load_settings(config_file=config_file, environ=os.environ)
    logs.configure(level=settings.log_level, format=settings.log_format, part=part)
    return settings


def catalog_of(settings: Settings) -> Catalog:
    """The public names of the configured models. Reads presets, no model files."""
    directories = presets_dirs(settings.presets_dir)
    return Catalog.of((load_facts(model, presets_dirs=directories) for model in settings.models), settings.aliases)


def require_nats(settings: Settings) -> None:
    """A part that runs on its own needs a NATS to meet the others on."""
    if not settings.nats.url:
        raise StartupError(
            "nats.url is empty; set APPLIANCE_NATS_URL, for example nats://nats.internal:4222, "
            "or run `appliance up`, which brings its own"
        )


def run(main: Coroutine[object, object, None]) -> None:
    """Run on uvloop: half the CPU of the standard loop for many small messages."""
    _collect_less()
    # The event loop waits for a turn behind a thread that tokenizes: ten times less than Python's default.
    sys.setswitchinterval(THREAD_TURN_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_counted(main))


def _collect_less() -> None:
    """Keep the garbage collector off what start-up made, and from looking at every few requests' worth of objects.

    It took 7 % of the gateway's CPU, and a full collection stops everything for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 20, 20)


async def _counted(main: Coroutine[object, object, None]) -> None:
    """`main`, with what it counts handed over from time to time and at its end."""
    flushing = asyncio.create_task(tally.keep_flushed())
    try:
        await main
    finally:
        flushing.cancel()
        await asyncio.wait({flushing})


def stop_signals() -> asyncio.Event:
    """An event that SIGTERM, SIGINT or a closed terminal sets. Call it on the running loop."""
    stop = asyncio.Event()
    numbers = [signal.SIGTERM, signal.SIGINT]
    # Under nohup a closed terminal is to change nothing.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for child in error.exceptions:
            yield from _leaves(child)
    else:
        yield error
