"""`appliance bench`: a load test of the embeddings of any OpenAI-compatible server."""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click
import msgspec
import uvloop

from appliance.bench.http import Address, Unanswered
from appliance.bench.load import Server, Shape
from appliance.bench.plot import check_plot, draw
from appliance.bench.report import report
from appliance.bench.schedule import INPUTS_MAX, Lengths, Rates, parse_lengths, parse_rates
from appliance.bench.session import Closed, Plan, Result, measure
from appliance.cli.startup import startup_errors

EXIT_NOT_MEASURED = 1
KEY_VARIABLES = ("APPLIANCE_BENCH_API_KEY", "OPENAI_API_KEY")


T = TypeVar("T")


def _parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T]:
    """An option's callback, which words a ValueError as click does."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: str) -> T:
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


@click.command("bench")
@click.option("--base-url", default="http://127.0.0.1:8080/v1", show_default=True, help="As for an OpenAI client.")
@click.option("--model", default="text-embedding-3-small", show_default=True, help="As in the request.")
@click.option("--api-key", help=f"Default: the first set of {', '.join(KEY_VARIABLES)}.")
@click.option("--against", metavar="URL", help="Measure this server too, alternately, and print ratios.")
@click.option("--against-model", help="The other server's name of the model; default: the same.")
@click.option("--against-api-key", help="Default: none; the first key is not shown to another server.")
@click.option(
    "--tokens",
    "lengths",
    callback=_parsed(parse_lengths),
    default="8-256",
    show_default=True,
    help='Text lengths: "64", "8-256" (uniform) or "lognormal:64:0.8" (median, sigma).',
)
@click.option("--inputs-per-request", "inputs", type=click.IntRange(1, INPUTS_MAX), default=1, show_default=True)
@click.option(
    "--rate",
    "rates",
    callback=_parsed(parse_rates),
    default="auto",
    show_default=True,
    help='Requests a second: "50", "10:200:10" (first, last, step), or "auto" / "auto:20" (find the knee).',
)
@click.option(
    "--concurrency", type=click.IntRange(1, 10_000), help="Closed loop with so many clients, instead of a rate."
)
@click.option("--slo-p95-ms", type=click.FloatRange(1), default=250.0, show_default=True, help="The latency objective.")
@click.option("--duration-s", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Of one step.")
@click.option("--warmup-s", type=click.FloatRange(0), default=2.0, show_default=True, help="Before each step.")
@click.option("--timeout-s", type=click.FloatRange(0.1), default=10.0, show_default=True, help="For one answer.")
@click.option("--repeats", type=click.IntRange(1, 100), default=1, show_default=True, help="Of each step.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--in-flight-max", type=click.IntRange(1, 50_000), default=1024, show_default=True)
@click.option("--encoding", type=click.Choice(["base64", "float"]), default="base64", show_default=True)
@click.option("--server-pid", type=click.IntRange(1), help="Count the CPU of this process and all below it.")
@click.option("--against-server-pid", type=click.IntRange(1), help="The same for the other server.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures here.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False), help="A .png or .svg.")
def bench_command(  # noqa: PLR0917  # click passes by name
    base_url: str,
    model: str,
    api_key: str | None,
    against: str | None,
    against_model: str | None,
    against_api_key: str | None,
    lengths: Lengths,
    inputs: int,
    rates: Rates,
    concurrency: int | None,
    slo_p95_ms: float,
    duration_s: float,
    warmup_s: float,
    timeout_s: float,
    repeats: int,
    seed: int,
    in_flight_max: int,
    encoding: str,
    server_pid: int | None,
    against_server_pid: int | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Load-test the embeddings of any OpenAI-compatible server.

    It finds what they bear. Chats and other calls are not loaded.

    Requests are sent open loop: at random times (Poisson) that do not wait for answers, as many independent clients do.
    The knee is the largest load whose p95 is within the objective and where nine in ten added requests are still
    answered well. Saturation is the largest goodput: right answers within the objective, a second.
    """
    key = api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    shape = Shape(
        lengths=lengths,
        inputs=inputs,
        encoding=encoding,
        slo_s=math.inf if concurrency else slo_p95_ms / 1000,
        duration_s=duration_s,
        warmup_s=warmup_s,
        timeout_s=timeout_s,
        in_flight_max=in_flight_max,
    )
    plan = Plan(shape, Closed(concurrency) if concurrency else rates, repeats, seed)
    servers = [Server(base_url, model, key, server_pid)]
    if against:
        servers.append(Server(against, against_model or model, against_api_key, against_server_pid))
    with startup_errors():
        _check(servers, plot_file=plot_file)
        result = _run(plan, servers)
        click.echo(report(result))
        if json_file:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
        if plot_file:
            draw(result, plot_file)


def _check(servers: list[Server], *, plot_file: Path | None) -> None:
    """All that can be wrong before anything is measured. Raises StartupError."""
    for server in servers:
        Address.of(server.base_url)
    if plot_file:
        check_plot(plot_file)


def _run(plan: Plan, servers: list[Server]) -> Result:
    progress = _Progress()
    try:
        return uvloop.run(measure(plan, servers, progress=progress))
    except Unanswered as error:
        click.echo(f"appliance: {error}", err=True)
        sys.exit(EXIT_NOT_MEASURED)
    finally:
        progress.clear()


class _Progress:
    """Lines on standard error; on a terminal, one that ends in a carriage return is overwritten by the next."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, line: str) -> None:
        self.clear()
        if not line.endswith("\r"):
            click.echo(line, err=True)
        elif self._is_terminal:
            click.echo(line.rstrip("\r"), err=True, nl=False)

    def clear(self) -> None:
        if self._is_terminal:
            click.echo("\r\x1b[2K", err=True, nl=False)
