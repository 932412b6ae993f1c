"""A node's words as SGLang's, and SGLang's as a node's. Pure."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from appliance.jobs import Sampling
from appliance.workers.engines.sglang import answers, asking
from appliance.workers.engines.sglang.answers import (
    EVENT_BYTES_MAX,
    LOGPROB_MIN,
    UNFIT,
    EventLines,
    StreamBroken,
    decode_event,
    fault,
    grown_of,
)
from appliance.workers.wire import Begin, Grown


def ids(*tokens: int) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def asked(begin: Begin) -> dict[str, Any]:
    """What goes over the wire: JSON."""
    found: dict[str, Any] = json.loads(msgspec.json.encode(asking.request_of(begin)))
    return found


def test_all_of_a_sampling_is_asked_for() -> None:
    sampling = Sampling(0.7, 0.9, 40, 0.05, 0.5, -0.5, 1.1, 7, ((3, -100.0), (9, 1.5)))
    begin = Begin(255, "m", ids(1, 2), 9, sampling, (5,), '{"grammars":[]}', 4, (), "polite")

    assert asked(begin) == {
        "rid": "00000000000000ff",
        "input_ids": [1, 2],
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 4,
        "lora_path": "polite",
        "sampling_params": {
            "max_new_tokens": 9,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "frequency_penalty": 0.5,
            "presence_penalty": -0.5,
            "repetition_penalty": 1.1,
            "sampling_seed": 7,
            "logit_bias": {"3": -100.0, "9": 1.5},
            "stop_token_ids": [5],
            "ebnf": '{"grammars":[]}',
            "no_stop_trim": True,
        },
    }


def test_what_is_not_asked_for_is_not_sent() -> None:
    body = asked(Begin(1, "m", ids(1), 2))

    assert body.keys() == {"rid", "input_ids", "stream", "sampling_params"}
    assert not {"ebnf", "sampling_seed", "logit_bias", "stop_token_ids"} & body["sampling_params"].keys()


@pytest.mark.parametrize("sampling", [Sampling(temperature=0, top_p=0.5, top_k=3, min_p=0.1), Sampling(top_p=0)])
def test_greedy_is_said_in_one_way(sampling: Sampling) -> None:
    params = asking.sampling_params(Begin(1, "m", ids(1), 2, sampling))

    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, -1, 0.0)


def test_weighing_is_one_token_that_is_not_chosen_by_chance() -> None:
    body = asked(Begin(1, "m", ids(1), 50, Sampling(temperature=1.5), weighed=(8, 9)))

    assert body["token_ids_logprob"] == [8, 9]
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {"max_new_tokens": 1, "temperature": 0.0}


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (-1, -1), (-(2**63), -(2**63))],
)
def test_any_seed_is_a_signed_one(seed: int, expected: int) -> None:
    assert asking.signed(seed) == expected


def test_the_plugin_says_of_a_grammar_what_is_looked_for() -> None:
    """It runs in SGLang's environment, which cannot import ours, nor this one its."""
    plugin = Path(answers.__file__).with_name("inside") / "plugin" / "appliance_sglang.py"

    assert f'UNFIT: Final = "{UNFIT}"' in plugin.read_text()


def test_no_name_of_a_request_begins_as_another_does() -> None:
    """SGLang aborts every request whose name begins with the one it is given."""
    names = [asking.rid_of(number) for number in (1, 10, 16, 100, 2**40)]

    assert len({len(name) for name in names}) == 1
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("begin", "word"),
    [
        (Begin(1, "m", b"", 2), "no tokens"),
        (Begin(1, "m", b"123", 2), "no tokens"),
        (Begin(1, "m", ids(1), 0), "over 10"),
        (Begin(1, "m", ids(*range(9)), 2), "over 10"),
        (Begin(1, "m", ids(1, 100), 2), "vocabulary"),
        (Begin(1, "m", ids(-1), 2), "vocabulary"),
        (Begin(1, "m", ids(1), 2, stop_ids=(100,)), "vocabulary"),
        (Begin(1, "m", ids(1), 2, weighed=(-1,)), "vocabulary"),
        (Begin(1, "m", ids(1), 2, Sampling(logit_bias=((100, 1.0),))), "vocabulary"),
        (Begin(1, "m", ids(1), 2, Sampling(repetition_penalty=2.1)), "penalty"),
        (Begin(1, "m", ids(1), 2, adapter="gone"), "not loaded"),
    ],
)
def test_a_bad_sequence_is_refused(begin: Begin, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        asking.check(begin, vocabulary=100, tokens_max=10, adapters={"here"})


@pytest.mark.parametrize("begin", [Begin(1, "m", ids(*range(8)), 2), Begin(1, "m", ids(99), 9, adapter="here")])
def test_the_edge_of_what_fits_is_taken(begin: Begin) -> None:
    asking.check(begin, vocabulary=100, tokens_max=10, adapters={"here"})


def test_events_are_cut_wherever_their_bytes_are() -> None:
    stream = b'data: {"a":1}\n\n: ping\n\ndata:{"b":"\xc3\xa9"}\r\n\r\ndata: [DONE]\n\ndata: never\n\n'
    for size in (1, 2, 7, len(stream)):
        lines = EventLines()
        found = [data for start in range(0, len(stream), size) for data in lines.feed(stream[start : start + size])]
        assert found[:2] == [b'{"a":1}', b'{"b":"\xc3\xa9"}']
        assert lines.is_done


def test_an_endless_event_is_not_gathered() -> None:
    lines = EventLines()

    with pytest.raises(StreamBroken):
        lines.feed(b"data: " + b"x" * EVENT_BYTES_MAX)


@pytest.mark.parametrize("data", [b"", b"{", b'{"output_ids":"no"}', b"[]"])
def test_an_event_that_is_none_is_said_to_be(data: bytes) -> None:
    with pytest.raises(StreamBroken):
        decode_event(data)


def grown(meta: str, *, begin: Begin, tokens: str = "[7,8]", is_first: bool = True) -> Grown:
    return grown_of(decode_event(f'{{"output_ids":{tokens},"meta_info":{meta}}}'.encode()), begin, is_first=is_first)


def test_ids_and_ends_are_passed_on() -> None:
    begin = Begin(3, "m", ids(1), 9)

    assert grown('{"finish_reason":null,"cached_tokens":4}', begin=begin) == Grown(3, (7, 8), cached=4)
    assert grown('{"finish_reason":null,"cached_tokens":4}', begin=begin, is_first=False) == Grown(3, (7, 8))
    assert grown('{"finish_reason":{"type":"stop","matched":8}}', begin=begin) == Grown(3, (7, 8), finish="stop")
    assert grown('{"finish_reason":{"type":"length","length":2}}', begin=begin) == Grown(3, (7, 8), finish="length")


def test_log_probabilities_are_passed_on_and_finite() -> None:
    begin = Begin(3, "m", ids(1), 9, top_logprobs=2)
    meta = """{"output_token_logprobs":[[-0.5,7,null],[null,8,null]],
               "output_top_logprobs":[[[-0.5,7,null],[-1.5,9,null]],null]}"""

    assert grown(meta, begin=begin) == Grown(3, (7, 8), (-0.5, LOGPROB_MIN), ((7, 9), ()), ((-0.5, -1.5), ()))


def test_log_probabilities_without_a_ranking() -> None:
    begin = Begin(3, "m", ids(1), 9, top_logprobs=0)
    meta = '{"output_token_logprobs":[[-0.5,7,null],[-0.25,8,null]]}'

    assert grown(meta, begin=begin) == Grown(3, (7, 8), (-0.5, -0.25), ((), ()), ((), ()))


@pytest.mark.parametrize(
    "meta",
    [
        "{}",
        '{"output_token_logprobs":[[-0.5,7,null]],"output_top_logprobs":[[],[]]}',
        '{"output_token_logprobs":[[-0.5,7,null],[-0.5,9,null]],"output_top_logprobs":[[],[]]}',
        '{"output_token_logprobs":[[-0.5,7,null],[-0.5,8,null]],"output_top_logprobs":[[]]}',
    ],
)
def test_numbers_that_do_not_belong_to_the_ids_are_never_passed_on(meta: str) -> None:
    with pytest.raises(StreamBroken):
        grown(meta, begin=Begin(3, "m", ids(1), 9, top_logprobs=1))


def test_weights_come_in_the_order_asked_for() -> None:
    begin = Begin(3, "m", ids(1), 1, weighed=(5, 4, 5))
    meta = """{"output_token_ids_logprobs":[[[-1.0,4,null],[-2.0,5,null]]],"finish_reason":{"type":"length"},
               "cached_tokens":6}"""

    assert grown(meta, begin=begin, tokens="[1]") == Grown(3, (), (-2.0, -1.0, -2.0), finish="stop", cached=6)
    with pytest.raises(StreamBroken):
        grown('{"output_token_ids_logprobs":[[[-1.0,4,null]]]}', begin=begin)


def test_what_the_client_is_to_blame_for_is_said_and_nothing_else() -> None:
    begin = Begin(3, "m", ids(1), 9)
    aborted = '{"finish_reason":{"type":"abort","message":"bad grammar in /srv/x.py","status_code":400}}'
    broken = '{"finish_reason":{"type":"abort","message":"secret","status_code":500}}'
    refused = decode_event(b'{"error":{"message":"too hot","code":400}}')

    assert grown(aborted, begin=begin) == Grown(3, finish="refused", fault="bad grammar in <path>")
    assert grown(broken, begin=begin) == Grown(3, finish="fault", fault="the engine failed")
    assert grown_of(refused, begin, is_first=True).fault == "too hot"
    unfit = f"Grammar accept_token failed: {UNFIT}: too many expressions in /srv/x.rs"
    assert fault(3, unfit, status=500) == Grown(3, finish="refused", fault=f"{UNFIT}: too many expressions in <path>")
    assert fault(3, "x" * 1000, status=422).fault == "x" * 199 + "…"
    assert fault(3, "", status=400).fault == "the engine failed"
