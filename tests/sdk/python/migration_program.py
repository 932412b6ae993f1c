"""A newcomer's program, written for OpenAI: it knows of no other server. See test_migration.py."""

import sys

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings

NOTES = {
    "bread": "Mix flour, water, salt and yeast, let the dough rise overnight, and bake it for forty minutes.",
    "paris": "The Eiffel Tower, finished in 1889, is the most visited monument of the French capital.",
    "plants": "Through photosynthesis, leaves turn sunlight, water and carbon dioxide into sugar.",
    "moon": "In July 1969 two astronauts of Apollo 11 walked on the surface of the Moon.",
    "chess": "In chess the bishop moves diagonally, and the rook along ranks and files.",
    "python": "The language was named after a British comedy group, not after the snake.",
}


def main() -> None:
    store = InMemoryVectorStore(OpenAIEmbeddings())
    store.add_documents([Document(page_content=text, metadata={"name": name}) for name, text in NOTES.items()])
    for question in sys.argv[1:]:
        (best,) = store.similarity_search(question, k=1)
        print(best.metadata["name"])


if __name__ == "__main__":
    main()
