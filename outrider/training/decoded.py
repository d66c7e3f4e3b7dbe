"""What a drafter that learns does in real decoding: tokens per step of the target on held-out prompts."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.assembly import assemble
from outrider.core.types import InputError, Sampling
from outrider.learning.batch import Document
from outrider.learning.learner import Learner
from outrider.setup import Setup

AT_ONCE = 8
"""Most prompts that are decoded at once."""
BEGINNING = 32
"""Tokens of a text without a prompt that become the prompt."""


class DecodedPrompts:
    """Decodes held-out prompts with the drafter as it is now, as `outrider generate` would.

    The drafter is written to a temporary folder and loaded from there. The target's weights are used as they are. Every
    measurement has the same prompts, seeds and lengths.

    Args:
        target: The target.
        tokenizer: Its tokenizer; None if there is none.
        documents: Held-out texts, of which the first `count` are used.
        drafter: The drafter's name in the catalog.
        count: How many prompts.
        depth: Draft tokens of a step.
        temperature: Of the outputs.
        max_new_tokens: Tokens of an output.
        max_length: Most tokens of a prompt and its output.

    Raises:
        InputError: There are no held-out texts, or outputs are longer than texts may be.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        documents: Sequence[Document],
        *,
        drafter: str,
        count: int,
        depth: int,
        temperature: float,
        max_new_tokens: int = 64,
        max_length: int = 512,
    ) -> None:
        most = max_length - max_new_tokens
        if most < 1:
            raise InputError(
                f"prompts that are decoded while watching get {max_new_tokens} new tokens, and a text has at most "
                f"{max_length}; give a larger --max-length, or leave out --watch-prompts"
            )
        self._target, self._tokenizer, self._drafter = target, tokenizer, drafter
        self._depth, self._sampling = depth, Sampling(temperature=temperature, seed=0)
        self._max_new_tokens = max_new_tokens
        texts = [documents[i] for i in range(min(count, len(documents)))]
        self.prompts = [each.tokens[: each.start or BEGINNING][-most:].tolist() for each in texts]

    def block_efficiency(self, learner: Learner) -> float:
        """Tokens per step of the target over all prompts."""
        with TemporaryDirectory(prefix="outrider-") as folder:
            learner.write(Path(folder))
            engine = assemble(
                Setup(
                    target=self._target,
                    drafter=f"{self._drafter}:path={folder}",
                    tokenizer=self._tokenizer,
                    length=f"fixed:{self._depth}",
                    max_slots=min(AT_ONCE, len(self.prompts)),
                    forward="eager",
                    ignore_generation_config=True,
                )
            )
            outputs = engine.generate(
                self.prompts, max_new_tokens=self._max_new_tokens, sampling=self._sampling, ignore_eos=True
            )
        return sum(len(each.tokens) for each in outputs) / max(1, sum(each.num_steps for each in outputs))
