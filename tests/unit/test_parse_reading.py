"""Models that read raw texts: how texts are sized and cut, what becomes of spans, and what is loaded at all."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from appliance.errors import EngineFailed, InvalidRequest, StartupError, TooLong
from appliance.jobs import Classify, Embed, Extract, Job, Span, Spans, Task, Tokenize
from appliance.presets import Facts
from appliance.workers.parse_reading import ParseReader
from appliance.workers.raw_texts import CHARS_A_TOKEN, RawTexts
from appliance.workers.read_job import Reading
from appliance.workers.spacy_files import check_spacy_folder
from appliance.workers.wire import Loaded

CHARS_MAX = 2 * CHARS_A_TOKEN
LABELS = ("PERSON", "ORG")


def read(task: Task) -> Reading:
    card = Loaded("m", 4, 1000, "float32", 0, 0.0, labels=LABELS)
    reader = ParseReader(RawTexts(2), Facts("m", tasks=("extract",)), card)
    return reader.read(Job("j", "m", task, "r", 1.0, first_index=5))


def spans_of(reading: Reading, *rows: Sequence[tuple[float, ...]]) -> tuple[tuple[Span, ...], ...]:
    buffers = [memoryview(np.array(each, dtype="<f4").reshape(-1, 4).tobytes()) for each in rows]
    (part,) = reading.answer(buffers, 4, 1024)
    assert isinstance(part, Spans)
    return part.inputs


@pytest.mark.parametrize(("chars", "tokens"), [(1, 1), (4, 1), (5, 2), (CHARS_MAX, 2)])
def test_a_text_is_sized_by_its_characters(chars: int, tokens: int) -> None:
    (item,) = read(Extract(("ü" * chars,))).items

    assert (item.count, item.is_truncated, item.rows, item.ids) == (tokens, False, "any", b"")


def test_a_long_text_loses_its_end_or_its_start_and_spans_stand_where_they_stood() -> None:
    text = "0123456789"
    end, start = read(Extract((text,))), read(Extract((text,), truncation="start"))

    assert [item.text for item in (*end.items, *start.items)] == ["01234567", "23456789"]
    assert all(item.is_truncated for item in (*end.items, *start.items))
    assert spans_of(end, [(1, 3, 0, 1.0)]) == ((Span(1, 3, "PERSON", 1.0),),)
    assert spans_of(start, [(1, 3, 1, 1.0)]) == ((Span(3, 5, "ORG", 1.0),),)


def test_only_what_is_wanted_is_answered() -> None:
    found = [(0.0, 1.0, 0.0, 0.5), (2.0, 3.0, 1.0, 1.0)]

    assert spans_of(read(Extract(("a b",), labels=("ORG",))), found) == ((Span(2, 3, "ORG", 1.0),),)
    assert spans_of(read(Extract(("a b",), score_min=0.75)), found) == ((Span(2, 3, "ORG", 1.0),),)
    assert spans_of(read(Extract(("a b", "c"))), found, []) == (
        (Span(0, 1, "PERSON", 0.5), Span(2, 3, "ORG", 1.0)),
        (),
    )


@pytest.mark.parametrize(
    ("task", "kind", "param"),
    [
        (Extract(("ok", "123456789"), truncation="none"), TooLong, "input[6]"),
        (Extract(("",)), InvalidRequest, "input[5]"),
        (Extract(()), InvalidRequest, "input"),
        (Extract(("a",), labels=("NOTHING",)), InvalidRequest, "labels"),
        (Extract(("a",), truncation="chunk_mean"), InvalidRequest, "truncate"),
        (Embed(("a",)), InvalidRequest, "model"),
        (Classify(("a",)), InvalidRequest, "model"),
        (Tokenize("a"), InvalidRequest, "model"),
    ],
)
def test_what_cannot_be_served_is_named(task: Task, kind: type[InvalidRequest], param: str) -> None:
    with pytest.raises(kind) as caught:
        read(task)

    assert caught.value.param == param


def test_rows_that_are_no_spans_are_the_engines_fault() -> None:
    with pytest.raises(EngineFailed):
        read(Extract(("a",))).answer([memoryview(b"\0" * 8)], 2, 1024)


GOOD = """
[nlp]
lang = "en"
before_creation = null
tokenizer = {"@tokenizers":"spacy.Tokenizer.v1"}
[components.ner]
factory = "ner"
[components.ner.model]
@architectures = "spacy.TransitionBasedParser.v2"
[training.logger]
@loggers = "anything.of.training.v1"
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("spacy.TransitionBasedParser.v2", "theirs.Parser.v1"), "theirs.Parser.v1"),
        (("spacy.Tokenizer.v1", "theirs.Tokenizer.v1"), "theirs.Tokenizer.v1"),
        (("before_creation = null", 'before_creation = {"@callbacks":"theirs.v1"}'), "theirs.v1"),
        (("[nlp]", "nlp]"), "cannot be read"),
    ],
)
def test_code_that_is_not_spacys_own_is_never_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    (tmp_path / "config.cfg").write_text(GOOD)
    check_spacy_folder(tmp_path, {"config.cfg"})

    (tmp_path / "config.cfg").write_text(GOOD.replace(*change))
    with pytest.raises(StartupError, match=message):
        check_spacy_folder(tmp_path, {"config.cfg"})


def test_a_file_that_nobody_listed_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.cfg").write_text(GOOD)
    (tmp_path / "ner").mkdir()
    (tmp_path / "ner" / "model").write_bytes(b"")

    with pytest.raises(StartupError, match="ner/model"):
        check_spacy_folder(tmp_path, {"config.cfg"})
    check_spacy_folder(tmp_path, {"config.cfg", "ner/model"})


def test_a_folder_without_settings_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.cfg"):
        check_spacy_folder(tmp_path, ())
