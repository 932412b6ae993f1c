"""What an embedding asks of a model: which tokens, with which prompt, how cut; and what its rows become."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Final, Literal

import msgspec

from appliance.errors import InvalidRequest, StartupError
from appliance.jobs import Embed, Output, Part
from appliance.presets import Facts
from appliance.workers import embedding_parts
from appliance.workers.prompts import Prompter
from appliance.workers.read_job import FLOAT_BYTES, Reading
from appliance.workers.tokenize import Tokenizer
from appliance.workers.tokens import Tokens, Window
from appliance.workers.vector_space import VectorSpace
from appliance.workers.wire import Loaded

# Of one input under "chunk_mean": 65,000 tokens of a model that takes 256. What is longer is no one text any more.
WINDOWS_MAX: Final = 256
# Of one job's token vectors, which a node holds until the last of them is there.
TOKEN_VECTORS_BYTES_MAX: Final = 128 * 1024 * 1024

_ITEM_ROWS: Final[dict[Output, Literal["one", "per_token", "any"]]] = {
    "dense": "one",
    "multivector": "per_token",
    "sparse": "any",
}


class EmbeddingReader:
    """How one model reads embeddings."""

    def __init__(self, tokenizer: Tokenizer, facts: Facts, card: Loaded, space: VectorSpace) -> None:
        """Raises StartupError for facts that the loaded model does not bear out."""
        if "embed" in facts.tasks:
            _check_facts(facts, card)
        self.prompter = Prompter(facts.name, space.prompts)
        self._tokenizer = tokenizer
        self._facts = facts
        self._width = card.width
        self._space = space
        self._outputs = _outputs_of(facts, card)

    def read(self, task: Embed, *, first_index: int) -> Reading:
        """Blocks. Raises InvalidRequest or TooLong, naming the field."""
        self._check(task)
        prompt = self.prompter.choose(task.intent, inputs=len(task.inputs) or len(task.ids))
        space = self._space.text(prompt=prompt, width=task.width or self._width)
        if task.truncation == "chunk_mean":
            return self._in_pieces(task, prompt or "", first_index, space)
        texts = self._tokens(task, prompt or "", first_index)
        if task.outputs == ("dense",):
            answer = partial(embedding_parts.dense, asked=task.width, first_index=first_index)
            return Reading(texts, answer, space=space)
        return self._in_several_ways(task, texts, first_index, space)

    def _tokens(self, task: Embed, prompt: str, first_index: int) -> list[Tokens]:
        cut = task.truncation
        assert cut != "chunk_mean", "its pieces are read elsewhere"
        if task.ids:
            return self._tokenizer.native.encode(
                task.ids,
                prompt=self._tokenizer.ids_of(prompt),
                truncation=cut,
                tokens_max=task.tokens_max,
                first_index=first_index,
            )
        return self._tokenizer.encode(
            task.inputs, prompt=prompt, truncation=cut, tokens_max=task.tokens_max, first_index=first_index
        )

    def _in_pieces(self, task: Embed, prompt: str, first_index: int, space: str) -> Reading:
        """Each text in as many pieces as it takes, and the mean of their vectors."""
        texts = self._windows(task, prompt, first_index)
        counts = [len(windows) for windows in texts]
        windows = list(chain.from_iterable(texts))
        answer = partial(
            embedding_parts.means,
            weights=[window.weight for window in windows],
            counts=counts,
            asked=task.width,
            first_index=first_index,
        )
        owners = tuple(index for index, count in enumerate(counts) for _ in range(count))
        return Reading([window.tokens for window in windows], answer, owners, space=space)

    def _windows(self, task: Embed, prompt: str, first_index: int) -> list[list[Window]]:
        if task.ids:
            return self._tokenizer.native.windows(
                task.ids,
                prompt=self._tokenizer.ids_of(prompt),
                tokens_max=task.tokens_max,
                windows_max=WINDOWS_MAX,
                first_index=first_index,
            )
        return self._tokenizer.windows(
            task.inputs, prompt=prompt, tokens_max=task.tokens_max, windows_max=WINDOWS_MAX, first_index=first_index
        )

    def _in_several_ways(self, task: Embed, texts: Sequence[Tokens], first_index: int, space: str) -> Reading:
        """All texts for the first output, then all for the next: the model runs once for each."""
        tokens = sum(text.count for text in texts)
        size = FLOAT_BYTES * self._width * tokens
        if "multivector" in task.outputs and size > TOKEN_VECTORS_BYTES_MAX:
            raise InvalidRequest(
                f"the {tokens} tokens of these {len(texts)} inputs have vectors of {size} B, at most "
                f"{TOKEN_VECTORS_BYTES_MAX} B are computed at once; send fewer inputs in one request",
                param="input",
            )

        def answer(buffers: Sequence[memoryview], width: int, bytes_max: int) -> list[Part]:
            parts: list[Part] = []
            for place, output in enumerate(task.outputs):
                own = buffers[place * len(texts) : (place + 1) * len(texts)]
                match output:
                    case "dense":
                        parts += embedding_parts.dense(own, width, bytes_max, asked=task.width, first_index=first_index)
                    case "multivector":
                        parts += embedding_parts.multivector(own, width, bytes_max)
                    case "sparse":
                        parts += embedding_parts.sparse(own, width, bytes_max, first_index=first_index)
            return parts

        items = [msgspec.structs.replace(text, rows=_ITEM_ROWS[output]) for output in task.outputs for text in texts]
        owners = tuple(range(len(texts))) * len(task.outputs)
        return Reading(items, answer, owners, input_tokens=tokens, space=space)

    def _check(self, task: Embed) -> None:
        """Raises InvalidRequest for what this model cannot do."""
        missing = [output for output in task.outputs if output not in self._outputs]
        if missing or not task.outputs:
            raise InvalidRequest(
                f"'outputs' names {', '.join(missing) or 'nothing'}; {self._facts.name} gives "
                f"{', '.join(self._outputs)}",
                param="outputs",
            )
        if task.truncation == "chunk_mean" and task.outputs != ("dense",):
            raise InvalidRequest(
                "a text over the model's length is embedded in pieces here, which only the output 'dense' can be; "
                "leave 'outputs' out or choose a model name with another policy for long inputs",
                param="outputs",
            )
        if task.width is not None:
            self._check_width(task.width, outputs=task.outputs)

    def _check_width(self, width: int, *, outputs: Sequence[Output]) -> None:
        own, name, trained = self._width, self._facts.name, self._facts.matryoshka_widths
        if "dense" not in outputs:
            raise InvalidRequest("'dimensions' goes with the output 'dense'; leave one of them out", param="dimensions")
        if width == own or (trained and min(trained) <= width < own):
            return
        if trained:
            listed = ", ".join(map(str, sorted(trained)))
            choice = f"it can be cut to {min(trained)} and more, and was trained for {listed}"
        else:
            choice = f"it must not be cut; send {own} or leave 'dimensions' out"
        wider = "; for wider vectors ask for an alias with `pad_to`" if width > own else ""
        raise InvalidRequest(f"'dimensions' is {width}, {name} gives {own} and {choice}{wider}", param="dimensions")


def _check_facts(facts: Facts, card: Loaded) -> None:
    if "multivector" in facts.outputs and not card.has_token_vectors:
        raise StartupError(
            f"the facts of {facts.name} name the output 'multivector'; the model has no vectors of tokens, or makes "
            "something else of them than their mean: take it out of `outputs`"
        )
    if facts.matryoshka_widths and max(facts.matryoshka_widths) > card.width:
        raise StartupError(
            f"the facts of {facts.name} name the Matryoshka width {max(facts.matryoshka_widths)}; the model gives "
            f"{card.width}: correct `matryoshka_widths`"
        )


def _outputs_of(facts: Facts, card: Loaded) -> tuple[Output, ...]:
    """What the model gives: what its facts say, as far as its engine can; token vectors wherever there are some."""
    stated: list[Output] = [output for output in facts.outputs if output != "multivector"]
    if card.has_token_vectors:
        stated.append("multivector")
    return tuple(stated)
