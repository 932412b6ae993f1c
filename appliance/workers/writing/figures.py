"""What is counted of texts while they are written: on their node, before a gateway knows of any.

Canaries use a device and a place, and are in the figures of these. Of what clients wait for they are left out.
"""

import time
from collections.abc import Mapping

from appliance import telemetry
from appliance.jobs import is_canary
from appliance.workers.wire import Step
from appliance.workers.writing.open_text import OpenSequence


class Figures:
    """Of one model on one device."""

    def __init__(self, model: str, device: str) -> None:
        self._model = model
        self._device = device

    def step(self, step: Step, begun: Mapping[int, OpenSequence]) -> None:
        """The engine has written on. `begun` are the sequences that it has, by their numbers."""
        telemetry.DEVICE_SECONDS.labels(self._model, self._device).inc(step.device_s)
        if step.running and any(map(_is_a_clients, begun.values())):
            telemetry.STEP_TEXTS.labels(self._model).observe(step.running)
        for grown in step.grown:
            found = begun.get(grown.sequence)  # None: it was aborted
            if grown.ids and found is not None and _is_a_clients(found):
                telemetry.WRITTEN_TOKENS.labels(self._model).inc(len(grown.ids))
                self._note_first_token(found)

    def load(self, *, places: int, begun: int, pending: int) -> None:
        """How many texts there are, and how many can be written at once. Of those begun a few wait in the engine."""
        running = min(begun, places)
        telemetry.TEXT_PLACES.labels(self._model, self._device).set(places)
        telemetry.TEXTS.labels(self._model, self._device, "running").set(running)
        telemetry.TEXTS.labels(self._model, self._device, "waiting").set(begun + pending - running)

    def _note_first_token(self, one: OpenSequence) -> None:
        if not one.has_token:
            one.has_token = True
            waited_s = time.monotonic() - one.writing.opened.arrived_s
            telemetry.NODE_FIRST_TOKEN_SECONDS.labels(self._model).observe(waited_s)


def _is_a_clients(one: OpenSequence) -> bool:
    return not is_canary(one.writing.opened.job.id)
