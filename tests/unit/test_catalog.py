"""The catalog: names, aliases, and refusals that help."""

from typing import Any

import pytest

from appliance.catalog import NAMES_SHOWN_MAX, Catalog, Entry
from appliance.errors import ModelNotFound, StartupError
from appliance.presets import Facts, TaskName
from appliance.settings import AliasSettings

ONE = Facts(name="org/one", aliases=("one", "text-embedding-3-small"), width=4, tokens_max=8)
TWO = Facts(name="two", tasks=("embed", "rerank"))


def test_names_and_aliases_resolve_to_the_model() -> None:
    catalog = Catalog.of([ONE, TWO])

    assert [(catalog.resolve(name).model, catalog.resolve(name).is_alias) for name in ("org/one", "one", "two")] == [
        ("org/one", False),
        ("org/one", True),
        ("two", False),
    ]
    assert catalog.models() == ("org/one", "two")


def test_entries_list_every_public_name() -> None:
    assert Catalog.of([ONE, TWO]).entries() == (
        Entry("org/one", "org", None, ("embed",), 4, 8, ("dense",)),
        Entry("one", "org", "org/one", ("embed",), 4, 8, ("dense",)),
        Entry("text-embedding-3-small", "org", "org/one", ("embed",), 4, 8, ("dense",)),
        Entry("two", "appliance", None, ("embed", "rerank"), None, None, ("dense",), "cross-encoder"),
    )


@pytest.mark.parametrize(
    "models",
    [
        [ONE, Facts(name="two", aliases=("one",))],
        [ONE, Facts(name="two", aliases=("org/one",))],
        [Facts(name="two", aliases=("org/one",)), ONE],
        [ONE, ONE],
    ],
)
def test_a_name_claimed_twice_is_refused_with_both_models(models: list[Facts]) -> None:
    with pytest.raises(StartupError) as caught:
        Catalog.of(models)

    assert all(f'"{facts.name}"' in caught.value.message for facts in models)
    assert "aliases" in caught.value.message


def test_an_alias_that_repeats_its_model_is_harmless_and_an_empty_one_is_not() -> None:
    assert len(Catalog.of([Facts(name="two", aliases=("two", "x", "x"))]).entries()) == 2
    with pytest.raises(StartupError, match="empty alias"):
        Catalog.of([Facts(name="two", aliases=("",))])


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"pad_to": 3072}, "pad_to is 3072"),
        ({"width": 4}, "width is 4"),
        ({"intent": "query"}, "intent is 'query'"),
        ({"integers": "native"}, "integers is 'native'"),
        ({"too_long": "chunk_mean"}, "too_long is 'chunk_mean'"),
    ],
)
@pytest.mark.parametrize("task", ["generate", "rerank", "classify", "extract"])
def test_what_an_alias_says_of_vectors_is_refused_of_a_model_that_makes_none(
    options: dict[str, Any], key: str, task: TaskName
) -> None:
    with pytest.raises(StartupError) as caught:
        Catalog.of([Facts(name="m", tasks=(task,))], [AliasSettings("a", "m", **options)])

    assert caught.value.message.startswith(f'aliases "a": {key}, which "m" has no use for: its tasks are [\'{task}\']')


@pytest.mark.parametrize("task", ["generate", "rerank"])
def test_an_alias_of_any_model_may_refuse_what_is_too_long(task: TaskName) -> None:
    catalog = Catalog.of([Facts(name="m", tasks=(task,))], [AliasSettings("a", "m", too_long="error")])

    assert catalog.resolve("a").policy.too_long == "error"


@pytest.mark.parametrize("name", ["text-embedding-3-smal", "TEXT-EMBEDDING-3-SMALL"])
def test_an_unknown_name_gets_the_closest_one(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        Catalog.of([ONE, TWO]).resolve(name)

    assert 'did you mean "text-embedding-3-small"?' in caught.value.message
    assert "served: org/one, one, text-embedding-3-small, two" in caught.value.message
    assert caught.value.param == "model"


def test_the_refusal_is_bounded_however_long_the_name_and_the_list() -> None:
    catalog = Catalog.of([Facts(name=f"model-{number}") for number in range(1000)])

    with pytest.raises(ModelNotFound) as caught:
        catalog.resolve("x" * 1_000_000)

    assert f"and {1000 - NAMES_SHOWN_MAX} more" in caught.value.message
    assert len(caught.value.message) < 1000


def test_a_client_that_names_no_model_gets_the_first_that_does_the_task() -> None:
    ranker, classifier = Facts(name="ranker", tasks=("rerank",)), Facts(name="classifier", tasks=("classify",))
    catalog = Catalog.of([ranker, ONE, TWO, classifier])

    assert catalog.default("embed") == catalog.resolve("org/one")
    assert catalog.default("rerank", "embed") == catalog.resolve("ranker")
    assert catalog.default("classify", "embed") == catalog.resolve("classifier")
    assert Catalog.of([ONE]).default("classify", "embed") == catalog.resolve("org/one")
    with pytest.raises(ModelNotFound, match="no model served here does classify or extract"):
        Catalog.of([ONE]).default("classify", "extract")
