"""The simulation's claim in small: pulling bears more load than placing requests in advance, and why."""

import msgspec
import pytest

from tests.bench.pull_vs_push import WAYS, Scenario, compare, p99_s, stream_of

SCENARIO = Scenario(requests=1200)


@pytest.mark.slow
def test_pull_bears_more_than_push_when_workers_are_uneven_and_state_is_stale() -> None:
    found = {way: loads[0] for way, loads in compare(SCENARIO, [1]).items()}

    assert found["pull"] > 1.5 * found["round robin"]
    assert found["pull"] > 1.2 * found["least loaded"]
    assert found["pull"] >= found["two choices"]


@pytest.mark.slow
def test_least_loaded_push_loses_by_the_age_of_its_state_alone() -> None:
    fresh = compare(msgspec.structs.replace(SCENARIO, stale_s=0.0), [1], ["least loaded"])
    stale = compare(SCENARIO, [1], ["least loaded"])

    assert fresh["least loaded"][0] > 1.2 * stale["least loaded"][0]


@pytest.mark.parametrize("way", WAYS)
def test_every_request_is_answered_and_a_seed_tells_when(way: str) -> None:
    scenario = msgspec.structs.replace(SCENARIO, requests=200)
    stream = stream_of(scenario, seed=3)

    first = p99_s(way, scenario, stream, load=100.0, seed=3)

    assert 0 < first < 1.0, "infinity if one were lost"
    assert first == p99_s(way, scenario, stream, load=100.0, seed=3)


def test_a_lone_request_pays_one_hop_more_for_the_queue() -> None:
    scenario = Scenario(workers=1, fastest=1.0, requests=4)
    stream = msgspec.structs.replace(stream_of(scenario, seed=1), lengths=((100,),) * 4)

    # 2 ms a batch, 0.05 ms a token, 0.01 ms a text; to the queue, to the worker and back are 0.5 ms each.
    assert p99_s("pull", scenario, stream, load=0.1, seed=1) == pytest.approx(0.00701 + 0.0015)
    assert p99_s("round robin", scenario, stream, load=0.1, seed=1) == pytest.approx(0.00701 + 0.001)
