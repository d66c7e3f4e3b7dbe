"""The user's text, as a model reads it while it is watched."""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.lm.hf.anatomy import Anatomy

Texts = Sequence[Sequence[int]]
"""Texts as token ids."""
Progress = Callable[[int], None]
"""Is told how many tokens were read."""
LONGEST = 1024
"""Most tokens that are read at once."""


def pieces(texts: Texts, length: int) -> Iterator[Int[Tensor, "1 piece"]]:
    """The texts one after another, each cut into pieces of at most `length` tokens.

    Example:
        >>> [piece.tolist() for piece in pieces([[1, 2, 3], [], [4]], length=2)]
        [[[1, 2]], [[3]], [[4]]]
    """
    for text in texts:
        for start in range(0, len(text), length):
            yield torch.tensor([list(text[start : start + length])])


@torch.inference_mode()
def read(model: PreTrainedModel, texts: Texts, progress: Progress | None = None) -> int:
    """Let a model read texts, so that the hooks on its modules see them. Returns the number of tokens.

    Rows are never padded, so that hooks see no token that is not text.

    Raises:
        InputError: The texts hold no token, or one that the model does not know.
    """
    vocab = model.get_input_embeddings().num_embeddings
    total = sum(len(text) for text in texts)
    if total == 0:
        raise InputError("the text is empty; give documents of the task that the draft model is for")
    if (highest := max(max(text) for text in texts if len(text))) >= vocab:
        raise InputError(f"the text has the token {highest}, but the model knows {vocab} tokens; use its own tokenizer")
    for piece in pieces(texts, min(LONGEST, Anatomy.of(model).longest_context or LONGEST)):
        model(input_ids=piece.to(model.device), use_cache=False, logits_to_keep=1)
        if progress is not None:
            progress(piece.shape[1])
    return total
