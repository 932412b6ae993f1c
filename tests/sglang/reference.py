"""The same model by transformers in float32: what SGLang's answers are held against."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """One model, token by token."""

    def __init__(self, folder: Path) -> None:
        # Of no known type: mypy does not read transformers.
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Of the token after these: [vocabulary]."""
        logits: torch.Tensor = self._model(torch.tensor([list(ids)])).logits[0, -1]
        return torch.log_softmax(logits.float(), dim=-1)

    def greedy(self, ids: Sequence[int], count: int, *, ends: Sequence[int] = ()) -> list[int]:
        """The most probable token, again and again."""
        written: list[int] = []
        while len(written) < count and not (written and written[-1] in ends):
            written.append(int(self.logprobs([*ids, *written]).argmax()))
        return written

    @torch.no_grad()
    def add_to_weights(self, changes: Mapping[str, torch.Tensor]) -> None:
        """Change weights by name, in place."""
        weights = self._model.state_dict()
        for name, change in changes.items():
            weights[name] += change
