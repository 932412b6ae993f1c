"""The engine process: `python -m appliance.workers.host --socket PATH --engine NAME --threads N`.

It dials the node's socket, then answers one frame at a time, in order, with blocking calls: the next batch waits in
the kernel's buffer while the device works. Exit codes: 0 after `Stop` or when the node is gone, 2 for a frame it cannot
read, 3 when the device is lost. It never outlives its node.
"""

import argparse
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, assert_never

import msgspec

from appliance.logs import log_crashes
from appliance.processes import die_with_parent
from appliance.workers import wire
from appliance.workers.engine import DeviceLost, Engine, OutOfMemory, TextEngine
from appliance.workers.wire import (
    Abort,
    Begin,
    Encode,
    Encoded,
    Fault,
    FromEngine,
    Load,
    LoadAdapter,
    Loaded,
    Stop,
    ToEngine,
    UnloadAdapter,
)

EXIT_DONE: Final = 0
EXIT_MALFORMED_FRAME: Final = 2
EXIT_DEVICE_LOST: Final = 3
NO_ADAPTERS: Final = Fault(-1, "invalid", "this engine takes no adapters; SGLang does")

_MESSAGE_CHARS_MAX = 300
_PATH = re.compile(r"(?<![\w:/])(?:[A-Za-z]:\\|/)[^\s'\",;:()]+")

_log = logging.getLogger("appliance.engine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one node until it stops us or is gone; the return value is the exit code."""
    options = _options(arguments)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the whole group; the node decides
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    log_crashes()
    logging.getLogger("sentence_transformers").setLevel(logging.WARNING)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(options.socket)
        except OSError as exc:
            _log.info("nobody listens on the socket: %s", exc.strerror)
            return EXIT_DONE
        _limit_threads(options.threads)
        if options.engine in TEXT_ENGINES:
            from appliance.workers.text_host import serve_texts  # noqa: PLC0415  # it imports this module

            return serve_texts(connection, TEXT_ENGINES[options.engine]())
        return serve(connection, ENGINES[options.engine]())


def serve(connection: socket.socket, engine: Engine) -> int:
    """Answer frames until `Stop` or the end of the stream; returns the exit code."""
    while True:
        try:
            order = receive(connection)
        except ConnectionError:
            return EXIT_DONE
        except (ValueError, msgspec.DecodeError) as exc:  # DecodeError covers ValidationError
            _log.error("the node sent a malformed frame: %s", exc)
            return EXIT_MALFORMED_FRAME
        if order is None or isinstance(order, Stop):
            return EXIT_DONE
        if isinstance(order, Begin | Abort):
            _log.error("the node asked an engine for texts that writes none")
            return EXIT_MALFORMED_FRAME
        try:
            answer = _answer(engine, order)
        except DeviceLost:
            _log.exception("the device is lost; a new process has to take over")
            return EXIT_DEVICE_LOST
        try:
            connection.sendall(_framed(answer, order))
        except ConnectionError:
            return EXIT_DONE


def _encoder() -> Engine:
    # Offline before the hub library is imported: a model is a verified local folder, never a download.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from appliance.workers.engines.by_task import EngineByTask  # noqa: PLC0415  # each engine imports its own runtime

    return EngineByTask()


def _fake() -> Engine:
    from appliance.workers.engines.fake import FakeEngine  # noqa: PLC0415  # each engine imports only its own runtime

    return FakeEngine()


def _generator() -> TextEngine:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from appliance.workers.engines.generator.engine import GeneratorEngine  # noqa: PLC0415  # it imports torch

    return GeneratorEngine()


def _fake_texts() -> TextEngine:
    from appliance.workers.engines.fake_texts import FakeTexts  # noqa: PLC0415  # each engine imports only its own

    return FakeTexts()


ENGINES: Final[dict[str, Callable[[], Engine]]] = {"encoder": _encoder, "fake": _fake}
TEXT_ENGINES: Final[dict[str, Callable[[], TextEngine]]] = {"generator": _generator, "fake-texts": _fake_texts}


def _answer(engine: Engine, order: Load | Encode | LoadAdapter | UnloadAdapter) -> Loaded | Encoded | Fault:
    """Do what the frame asks. Whatever an engine raises, except `DeviceLost`, becomes a `Fault`."""
    if isinstance(order, LoadAdapter | UnloadAdapter):
        return NO_ADAPTERS
    batch = order.batch if isinstance(order, Encode) else -1
    try:
        match order:
            case Load():
                return engine.load(order)
            case Encode():
                return engine.encode(order)
            case _:
                assert_never(order)
    except DeviceLost:
        raise
    except (OutOfMemory, MemoryError) as exc:
        _log.warning("out of memory: %s", exc)
        return Fault(batch, "oom", public_words(exc))
    except ValueError as exc:
        _log.warning("refused: %s", exc)
        return Fault(batch, "invalid", public_words(exc))
    except Exception as exc:  # the loop that turns a bug or a runtime's error into an answer
        _log.exception("the engine failed")
        return Fault(batch, "failed", public_words(exc))


def _framed(answer: FromEngine, order: ToEngine) -> bytes:
    try:
        return wire.frame(answer)
    except ValueError as exc:  # more rows than one frame takes
        return wire.frame(Fault(order.batch if isinstance(order, Encode) else -1, "invalid", public_words(exc)))


def public_words(exc: BaseException) -> str:
    """One bounded line without file paths: it may travel to a client. The log has the whole."""
    text = _PATH.sub("<path>", " ".join(str(exc).split())) or "no message"
    line = text if isinstance(exc, ValueError | OutOfMemory) else f"{type(exc).__name__}: {text}"
    return line if len(line) <= _MESSAGE_CHARS_MAX else line[: _MESSAGE_CHARS_MAX - 1] + "…"


def receive(connection: socket.socket) -> ToEngine | None:
    """The next frame; None at the end of the stream. Raises ConnectionError, ValueError or `msgspec.DecodeError`."""
    header = _receive_exactly(connection, wire.LENGTH_BYTES)
    if header is None:
        return None
    body = _receive_exactly(connection, wire.body_length(header))
    return None if body is None else wire.decode_to_engine(body)


def _receive_exactly(connection: socket.socket, length: int) -> bytes | None:
    """`length` bytes, or None if the node hung up before they came."""
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if received == 0:
            return None
        view = view[received:]
    return bytes(buffer)


def _limit_threads(threads: int) -> None:
    """Size the thread pools of the numeric libraries; has effect only before they are imported. 0: one per core."""
    count = str(threads or os.cpu_count() or 1)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = count
    # Idle OpenMP threads spin by default, which takes the cores from the other processes of the appliance.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="appliance.workers.host", description="One engine process of a node.")
    parser.add_argument("--socket", required=True, help="the node's Unix socket")
    parser.add_argument("--engine", required=True, choices=sorted(ENGINES | TEXT_ENGINES))
    parser.add_argument("--threads", type=int, default=0, help="threads on a CPU; 0: one per core")
    return parser.parse_args(arguments)


def _exit(code: int) -> NoReturn:
    """At once: taking a runtime's modules apart takes seconds, and there is nothing left to save."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main())
