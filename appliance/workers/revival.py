"""An engine process that is started again whenever it dies, with growing pauses."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, NoReturn, TypeVar

from appliance import telemetry
from appliance.errors import StartupError
from appliance.workers.engine_process import EngineDied, EngineProcess

RESTART_DELAY_S_MIN: Final = 0.1
RESTART_DELAY_S_MAX: Final = 30.0
STEADY_S: Final = 60.0  # an engine that lived this long starts the delays anew
FIRST_STARTS_MAX: Final = 3  # an engine that was never ready by then is broken, not unlucky

E = TypeVar("E", bound=EngineProcess)

_log = logging.getLogger(__name__)


async def kept_alive(
    name: str,
    factory: Callable[[], AbstractAsyncContextManager[E]],
    serve: Callable[[E], Awaitable[NoReturn]],
    *,
    was_ready: Callable[[], bool],
) -> NoReturn:
    """Start the engine and `serve` it until that raises EngineDied, again and again, until cancelled.

    Raises StartupError when the engine was never ready: that would happen again.
    """
    delay_s = RESTART_DELAY_S_MIN
    for starts in itertools.count(1):
        started_s = time.monotonic()
        try:
            async with factory() as engine:
                telemetry.ENGINE_STARTS.labels(name).inc()
                await serve(engine)
        except EngineDied as death:
            if not was_ready() and starts >= FIRST_STARTS_MAX:
                last_words = " | ".join(death.stderr_tail[-3:])
                raise StartupError(f"the engine of {name} does not come up: {death.message}: {last_words}") from death
            _log.error("%s; it is started again in %.1f s", death.message, delay_s)
        await asyncio.sleep(delay_s)
        is_steady = time.monotonic() - started_s > STEADY_S
        delay_s = RESTART_DELAY_S_MIN if is_steady else min(2 * delay_s, RESTART_DELAY_S_MAX)
    raise AssertionError("counting never ends")
