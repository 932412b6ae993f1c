"""A key that sends too much is told when to go on; others are not held up by it."""

import pytest

from appliance.errors import RateLimited
from appliance.gateway.key_rates import KeyRates
from appliance.settings import GatewaySettings
from tests.gateway_parts import BODIES, KEY, Gateway


def test_a_minutes_worth_at_once_and_then_evenly() -> None:
    rates = KeyRates(keys=1, requests_per_minute=30)
    for _ in range(30):
        rates.take(0, now_s=100.0)

    with pytest.raises(RateLimited) as caught:
        rates.take(0, now_s=100.0)
    assert caught.value.retry_after_s == pytest.approx(2.0)
    with pytest.raises(RateLimited):
        rates.take(0, now_s=101.9)
    rates.take(0, now_s=102.1)
    with pytest.raises(RateLimited):
        rates.take(0, now_s=102.2)


def test_a_refusal_costs_nothing_and_rest_is_not_saved_up() -> None:
    rates = KeyRates(keys=1, requests_per_minute=60)
    for _ in range(60):
        rates.take(0, now_s=0.0)
    for number in range(50):
        with pytest.raises(RateLimited):
            rates.take(0, now_s=0.01 * number)

    rates.take(0, now_s=1.1)
    for _ in range(60):
        rates.take(0, now_s=10_000.0)
    with pytest.raises(RateLimited):
        rates.take(0, now_s=10_000.0)


def test_each_key_has_its_own() -> None:
    rates = KeyRates(keys=2, requests_per_minute=1)
    rates.take(0, now_s=0.0)
    with pytest.raises(RateLimited):
        rates.take(0, now_s=0.0)

    rates.take(1, now_s=0.0)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/rerank"])
async def test_a_key_over_its_limit_is_answered_429_with_the_wait(path: str) -> None:
    gateway = Gateway(limits=GatewaySettings(api_keys=(KEY, "another-key"), key_requests_per_minute=2))
    async with gateway.client() as client:
        answers = [await client.post(path, json=BODIES[path]) for _ in range(3)]
        other = await client.post(path, json=BODIES[path], headers={"authorization": "Bearer another-key"})
        models = await client.get("/v1/models")

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert 0 < int(answers[2].headers["retry-after-ms"]) <= 30_000
    assert answers[2].json()["error"] | {"message": ""} == {
        "message": "",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert answers[2].json()["message"]
    assert (other.status_code, models.status_code) == (200, 200)
