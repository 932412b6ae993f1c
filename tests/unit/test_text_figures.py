"""What nodes count of texts: those that clients asked for, as they are written."""

import time

import pytest
from prometheus_client import REGISTRY

from appliance import tally
from appliance.jobs import CANARY_PREFIX, Decide
from appliance.workers.open_job import OpenJob
from appliance.workers.wire import Grown, Step
from appliance.workers.writing.figures import Figures
from appliance.workers.writing.open_text import OpenDecision, OpenSequence
from tests.node_parts import RecordedDelivery, job_of

MODEL = "counted"


def sequence(job_id: str = "job", *, arrived_s: float = 0.0) -> OpenSequence:
    """Of a job of which nothing but its identity matters."""
    opened = OpenJob(job_of(job_id), RecordedDelivery(b""), arrived_s=arrived_s, extended_s=arrived_s)
    return OpenSequence(OpenDecision(opened, Decide(b"[]", ()), (), model=MODEL), 0)


def figure(name: str, **labels: str) -> float:
    tally.flush()
    return REGISTRY.get_sample_value(f"appliance_{name}", {"model": MODEL, **labels}) or 0.0


def counted() -> tuple[float, float, float, float]:
    """Tokens, first tokens, steps, and the seconds of the device."""
    return (
        figure("written_tokens_total"),
        figure("node_first_token_seconds_count"),
        figure("step_texts_count"),
        figure("device_seconds_total", device="here"),
    )


@pytest.mark.parametrize(
    ("job_id", "known", "expected"),
    [
        ("job", True, (3, 1, 1, 0.5)),
        (f"{CANARY_PREFIX}1", True, (0, 0, 0, 0.5)),
        ("job", False, (0, 0, 0, 0.5)),  # aborted
    ],
)
def test_what_clients_wait_for_is_counted(
    job_id: str, known: bool, expected: tuple[float, float, float, float]
) -> None:
    before = counted()
    begun = {1: sequence(job_id)} if known else {}

    Figures(MODEL, "here").step(Step((Grown(1, (7, 8, 9)),), device_s=0.5, running=1), begun)

    assert tuple(after - was for after, was in zip(counted(), before, strict=True)) == expected


def test_the_first_token_of_each_text_is_timed_from_its_delivery() -> None:
    before = counted()
    waited = figure("node_first_token_seconds_sum")
    begun = {1: sequence(arrived_s=time.monotonic() - 100), 2: sequence()}
    figures = Figures(MODEL, "here")
    figures.step(Step((Grown(1, ()),), device_s=0.0), begun)  # its prompt is read, nothing is written
    for _ in range(3):
        figures.step(Step((Grown(1, (7,)),), device_s=0.0, running=1), begun)

    assert [after - was for after, was in zip(counted(), before, strict=True)] == [3, 1, 3, 0]
    assert figure("node_first_token_seconds_sum") - waited == pytest.approx(100, abs=5)


@pytest.mark.parametrize(
    ("places", "begun", "pending", "running", "waiting"),
    [(4, 0, 0, 0, 0), (4, 3, 0, 3, 0), (4, 6, 2, 4, 4), (0, 0, 5, 0, 5)],
)
def test_texts_run_in_places_and_wait_for_them(
    places: int, begun: int, pending: int, running: int, waiting: int
) -> None:
    Figures(MODEL, "here").load(places=places, begun=begun, pending=pending)

    assert figure("text_places", device="here") == places
    assert figure("texts", device="here", state="running") == running
    assert figure("texts", device="here", state="waiting") == waiting
