"""The engine process: `python -m appliance.workers.engines.sglang.host --socket PATH --environment DIR --threads N`.

It runs under the node's own interpreter, dials the node's socket and speaks the frames of `wire.py`. Exit codes: 0
after `Stop` or when the node is gone, 2 for a frame it cannot read, 3 when SGLang has ended. It never outlives its
node, and SGLang never outlives it.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from appliance.logs import log_crashes
from appliance.processes import die_with_parent
from appliance.workers.engines.sglang.adapter import EXIT_DONE, Adapter
from appliance.workers.engines.sglang.environment import Environment

_log = logging.getLogger("appliance.engine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one node until it stops us or is gone; the return value is the exit code."""
    options = _options(arguments)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the whole group; the node decides
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    log_crashes()
    return asyncio.run(_serve(options.socket, Environment(options.environment), threads=options.threads))


async def _serve(socket: str, environment: Environment, *, threads: int) -> int:
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
    except OSError as exc:
        _log.info("nobody listens on the socket: %s", exc.strerror)
        return EXIT_DONE
    serving = asyncio.create_task(Adapter(reader, writer, environment=environment, threads=threads).serve())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    try:
        return await serving
    except asyncio.CancelledError:
        return EXIT_DONE  # told to end, and all of SGLang has
    finally:
        writer.close()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="appliance.workers.engines.sglang.host", description="SGLang for one node.")
    parser.add_argument("--socket", required=True, help="the node's Unix socket")
    parser.add_argument("--environment", required=True, type=Path, help="where SGLang is installed")
    parser.add_argument("--threads", type=int, default=0, help="threads on a CPU; 0: one per core")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
