"""Which tokens are kept: pure arithmetic on ids and masks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.workers.cutting import body, kept, pieces, without_start


@pytest.mark.parametrize(
    ("mask", "expected"),
    [([1, 0, 0, 1], (1, 3)), ([0, 0], (0, 2)), ([0, 1], (0, 1)), ([1, 1, 0], (2, 3)), ([1, 1], (2, 2)), ([], (0, 0))],
)
def test_where_a_text_begins_and_ends(mask: list[int], expected: tuple[int, int]) -> None:
    assert body(mask) == expected


@given(
    head=st.lists(st.integers(0, 9), max_size=3),
    ids=st.lists(st.integers(10, 99), max_size=40),
    tail=st.lists(st.integers(0, 9), max_size=3),
    room=st.integers(1, 9),
)
def test_every_token_is_in_one_piece_and_all_pieces_but_the_last_are_full(
    head: list[int], ids: list[int], tail: list[int], room: int
) -> None:
    limit = len(head) + room + len(tail)

    found = pieces(head, ids, tail, limit=limit)

    bodies = [piece.ids[len(head) : len(piece.ids) - len(tail)] for piece in found]
    assert [each for own in bodies for each in own] == ids
    assert [piece.weight for piece in found] == [len(own) for own in bodies]
    assert all(len(piece.ids) == limit for piece in found[:-1])
    assert all(piece.ids == [*head, *own, *tail] for piece, own in zip(found, bodies, strict=True))


@given(
    length=st.integers(1, 30),
    before=st.integers(0, 2),
    after=st.integers(0, 2),
    room=st.integers(1, 30),
    data=st.data(),
)
def test_what_is_cut_leaves_the_frame_and_the_prompt(
    length: int, before: int, after: int, room: int, data: st.DataObject
) -> None:
    mask = [1] * before + [0] * length + [1] * after
    values = list(range(len(mask)))
    limit = before + room + after
    keep = min(room, length)

    end = kept(values, mask, limit=limit, keeps_end=False)
    start = kept(values, mask, limit=limit, keeps_end=True)

    assert list(end) == [*values[: before + keep], *values[before + length :]]
    assert list(start) == [*values[:before], *values[before + length - keep :]]
    if length > room:
        prompt = data.draw(st.integers(0, room))
        without = without_start(values, mask, limit=limit, prompt=prompt)
        assert list(without) == [*values[: before + prompt], *values[before + prompt + length - room :]]
