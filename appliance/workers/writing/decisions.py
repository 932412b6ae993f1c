"""Questions to prompts whose answer is one token: its probabilities are the answer. Pure.

Options are lettered with tokens of the model's own vocabulary, so that each is told by a single look at the model.
"""

from collections.abc import Sequence
from itertools import product
from string import ascii_uppercase
from typing import Any, Final

from tokenizers import Tokenizer as RustTokenizer

from appliance.errors import InvalidRequest
from appliance.jobs import Question

_YES_NO: Final = ("Yes", "No")

Message = dict[str, Any]  # `Any`: JSON


class Labels:
    """Distinct single tokens of one vocabulary that letter options: A to Z, then AA, AB …"""

    def __init__(self, rust: RustTokenizer, *, count_max: int = 255) -> None:
        letters = [*ascii_uppercase, *("".join(pair) for pair in product(ascii_uppercase, repeat=2))]
        self._labels: list[tuple[str, int]] = []
        for label in letters:
            ids = rust.encode(label, add_special_tokens=False).ids
            if len(ids) == 1 and ids[0] not in [known for _, known in self._labels]:
                self._labels.append((label, ids[0]))
            if len(self._labels) == count_max:
                break
        self._yes_no = [rust.encode(word, add_special_tokens=False).ids[0] for word in _YES_NO]

    def of(self, question: Question) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The labels of the question's options, and their tokens. Raises InvalidRequest for too many options."""
        if question.kind == "predicate":
            if self._yes_no[0] == self._yes_no[1]:
                raise InvalidRequest(
                    "the model's vocabulary does not tell Yes from No by one token; ask a choice, or another model",
                    param="questions",
                )
            return _YES_NO, tuple(self._yes_no)
        count = len(question.options)
        if count > len(self._labels):
            raise InvalidRequest(
                f"a question has {count} options, the model's vocabulary letters {len(self._labels)}; ask about fewer",
                param="questions",
            )
        found = self._labels[:count]
        return tuple(label for label, _ in found), tuple(token for _, token in found)


def asked(messages: Sequence[Message], question: Question, labels: Sequence[str]) -> list[Message]:
    """The messages, with the question as what the user says last."""
    if question.kind == "predicate":
        words = f"Is the following true of the above?\n{question.instructions}\nAnswer with Yes or No only."
    else:
        task = "Rate the above" if question.kind == "score" else "Choose what fits the above best"
        listed = "\n".join(f"{label}. {option}" for label, option in zip(labels, question.options, strict=True))
        words = f"{task}.\n{question.instructions}\n{listed}\nAnswer with the letter only."
    return [*messages, {"role": "user", "content": words}]
