"""An engine process that writes texts: frames are taken in between steps, and each step's tokens sent as they come.

A thread reads the socket, so that a sequence can begin, or be aborted, while the model computes. The node bounds how
many sequences it begins. Exit codes are those of host.py.
"""

import logging
import queue
import socket
import threading
import time
from typing import Final

import msgspec

from appliance.workers import wire
from appliance.workers.engine import DeviceLost, OutOfMemory, TextEngine
from appliance.workers.host import EXIT_DEVICE_LOST, EXIT_DONE, EXIT_MALFORMED_FRAME, NO_ADAPTERS, public_words, receive
from appliance.workers.wire import Abort, Begin, Encode, Fault, Load, LoadAdapter, Loaded, Stop, ToEngine, UnloadAdapter

# A step with nothing to tell says that a long prompt is still being computed.
SILENCE_S_MAX: Final = 1.0
_MALFORMED: Final = "malformed"

_log = logging.getLogger("appliance.engine")


def serve_texts(connection: socket.socket, engine: TextEngine) -> int:
    """Take frames and send steps until `Stop` or the end of the stream; returns the exit code."""
    orders: queue.SimpleQueue[ToEngine | str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, orders), name="frames", daemon=True).start()
    try:
        return _serve(connection, engine, orders)
    except DeviceLost:
        _log.exception("the device is lost; a new process has to take over")
        return EXIT_DEVICE_LOST
    except ConnectionError:
        return EXIT_DONE


def _serve(connection: socket.socket, engine: TextEngine, orders: "queue.SimpleQueue[ToEngine | str | None]") -> int:
    sent_s = 0.0
    while True:
        while not engine.is_idle and orders.empty():
            step = engine.step()
            now_s = time.monotonic()
            if step.grown or now_s - sent_s > SILENCE_S_MAX:
                connection.sendall(wire.frame(step))
                sent_s = now_s
        match orders.get():
            case None | Stop():
                return EXIT_DONE
            case Load() as order:
                connection.sendall(wire.frame(_loaded(engine, order)))
            case Begin() as begin:
                engine.begin(begin)
            case Abort(sequences=sequences):
                engine.abort(sequences)
            case LoadAdapter() | UnloadAdapter():
                connection.sendall(wire.frame(NO_ADAPTERS))
            case Encode() | str():
                return EXIT_MALFORMED_FRAME


def _loaded(engine: TextEngine, order: Load) -> Loaded | Fault:
    try:
        return engine.load(order)
    except DeviceLost:
        raise
    except (OutOfMemory, MemoryError) as exc:
        return Fault(-1, "oom", public_words(exc))
    except ValueError as exc:
        _log.warning("refused: %s", exc)
        return Fault(-1, "invalid", public_words(exc))
    except Exception as exc:  # a bug or a runtime's error, which the node has to hear of
        _log.exception("the model cannot be loaded")
        return Fault(-1, "failed", public_words(exc))


def _read(connection: socket.socket, orders: "queue.SimpleQueue[ToEngine | str | None]") -> None:
    """Pass frames on until the stream ends."""
    while True:
        try:
            order = receive(connection)
        except ConnectionError:
            order = None
        except (ValueError, msgspec.DecodeError) as exc:
            _log.error("the node sent a malformed frame: %s", exc)
            orders.put(_MALFORMED)
            return
        orders.put(order)
        if order is None or isinstance(order, Stop):
            return
