"""How wide vectors are: the client's word, the policy of a name, and zeros that change nothing."""

import numpy as np
import pytest

from appliance.compat.widths import WIDTH_MAX, Widths, check_width
from appliance.errors import InternalError, InvalidRequest


@pytest.mark.parametrize(
    ("asked", "width", "pad_to", "computed", "padded"),
    [
        (None, None, None, None, None),
        (None, 256, None, 256, None),
        (None, None, 1536, None, 1536),
        (None, 256, 1536, 256, 1536),
        (384, None, None, 384, None),
        (384, 256, 1536, 384, None),
        (1536, 256, 1536, 256, 1536),
        (1536, None, 1536, None, 1536),
    ],
)
def test_the_client_wins_over_the_policy(
    asked: int | None, width: int | None, pad_to: int | None, computed: int | None, padded: int | None
) -> None:
    assert Widths.of(asked, width=width, pad_to=pad_to) == Widths(computed, padded)


def test_zeros_change_no_product_and_no_distance() -> None:
    vectors = np.random.default_rng(0).normal(size=(4, 6)).astype("<f4")

    padded = Widths(None, 10).pad(vectors)

    assert padded.shape == (4, 10)
    assert padded.dtype == np.dtype("<f4")
    np.testing.assert_array_equal(padded @ padded.T, vectors @ vectors.T)
    np.testing.assert_array_equal(np.linalg.norm(padded[0] - padded[1]), np.linalg.norm(vectors[0] - vectors[1]))


@pytest.mark.parametrize("padded", [None, 6])
def test_without_zeros_nothing_is_copied(padded: int | None) -> None:
    vectors = np.ones((2, 6), "<f4")

    assert Widths(None, padded).pad(vectors) is vectors


def test_a_policy_that_does_not_fit_the_model_is_told() -> None:
    with pytest.raises(InternalError, match="pads vectors to 4, the model's have 6"):
        Widths(None, 4).pad(np.ones((2, 6), "<f4"))


@pytest.mark.parametrize("width", [None, 1, 384, WIDTH_MAX])
def test_what_may_be_a_width_is_taken(width: int | None) -> None:
    check_width(width, field="dimensions")


@pytest.mark.parametrize("width", [0, -1, WIDTH_MAX + 1, 2**70])
def test_what_can_be_none_is_refused(width: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_width(width, field="dimensions")

    assert caught.value.param == "dimensions"


def test_a_padded_space_says_so() -> None:
    assert Widths(None, 8).space("model=m width=6") == "model=m width=6 padded=8"
    assert Widths(4).space("model=m width=4") == "model=m width=4"
    assert not Widths(None, 8).space("")
