"""The weights of a draft model that learns while it drafts: how they are trained, and how they come to draft."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.inputs import InputError
from outrider.drafters.model import ModelDrafter
from outrider.learning.divergences import Divergence
from outrider.lm.forwards.packed import packable
from outrider.lm.model import LanguageModel
from outrider.lm.open import as_lm
from outrider.lm.recurrent import RecurrentModel
from outrider.training.online.corrections import Lesson

REPLICAS = 2
"""Most copies of a draft model that draft: one for new requests, and one for requests that began before it."""


class OnlineDraft:
    """One draft model that learns. Changes in place.

    The master weights are in float32, whatever the draft model's dtype, and the optimizer changes only these. `publish`
    casts them into a copy of the draft model that no running request uses, and returns a new drafter over that copy. So
    the weights of a running request's drafter never change. The given drafter is never changed.

    Attributes:
        drafter: The drafter of new requests.
        master: The weights that are trained.
        num_rounds: Number of optimizer steps so far.

    Args:
        drafter: A draft model with the target's vocabulary.
        divergence: What an optimizer step lowers.
        learning_rate: Of AdamW, without weight decay.
        clip: Largest norm of a gradient.
        max_length: Most tokens before a correction that a forward of training reads.
    """

    def __init__(
        self,
        drafter: ModelDrafter,
        *,
        divergence: Divergence,
        learning_rate: float,
        clip: float,
        max_length: int,
    ) -> None:
        self.drafter, self.num_rounds = drafter, 0
        self._divergence, self._clip, self._max_length = divergence, clip, max_length
        self._first: ModelDrafter | None = drafter
        self._replicas = list[LanguageModel | RecurrentModel]()
        self.master = master_of(model_of(drafter))
        self._learning_rate = learning_rate
        self._optimizer = self._new_optimizer()

    def owns(self, drafter: object) -> bool:
        """Whether a drafter is this one, now or earlier."""
        lm = getattr(drafter, "lm", None)
        first = self._first is not None and drafter is self._first
        return first or any(lm is replica for replica in self._replicas)

    def learn(self, lessons: Sequence[Lesson]) -> float:
        r"""One optimizer step on the mean divergence over all places. Returns that mean.

        Texts are read one after another, so memory is that of the longest. Runs in any thread.
        """
        recent = [part for lesson in lessons if (part := lesson.recent(self._max_length)).places]
        count, total = sum(len(part.places) for part in recent), 0.0
        with torch.inference_mode(False), torch.enable_grad():
            self._optimizer.zero_grad(set_to_none=True)
            for part in recent:
                loss = self._loss(part) / count
                loss.backward()
                total += float(loss.detach())
            nn.utils.clip_grad_norm_(self.master.parameters(), self._clip)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self.num_rounds += 1
        return total

    def publish(self, used: Collection[object]) -> ModelDrafter | None:
        """A new drafter with the newest weights, which becomes `drafter`. None if all copies are in use.

        Args:
            used: The drafters of running requests.
        """
        lm = self._unused_copy(used)
        if lm is None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            for weight, newest in zip(lm.model.parameters(), self.master.parameters(), strict=True):
                weight.copy_(newest)
        if isinstance(lm, LanguageModel):
            lm.renew()
        self.drafter = replace(self.drafter, lm=lm)
        return self.drafter

    def weights(self) -> list[Tensor]:
        """A copy of the master weights."""
        return [weight.detach().clone() for weight in self.master.parameters()]

    def restore(self, weights: Sequence[Tensor]) -> None:
        """Go back to earlier weights. What the optimizer has gathered is dropped."""
        with torch.inference_mode(False), torch.no_grad():
            for weight, old in zip(self.master.parameters(), weights, strict=True):
                weight.copy_(old)
        self._optimizer = self._new_optimizer()

    def resume(self, model: PreTrainedModel, num_rounds: int) -> None:
        """Go on with weights that an earlier run has learnt; new requests get them. The optimizer begins anew.

        Args:
            model: A snapshot.
            num_rounds: Number of optimizer steps that the snapshot has behind it.

        Raises:
            InputError: The snapshot is one of another draft model.
        """
        newest, current = list(model.parameters()), list(self.master.parameters())
        if [weight.shape for weight in newest] != [weight.shape for weight in current]:
            raise InputError("the snapshots are those of another draft model; give another folder of snapshots")
        self.restore(newest)
        self.num_rounds = num_rounds
        self.publish([])

    def written(self) -> PreTrainedModel:
        """A model with the newest weights, in the draft model's dtype."""
        return copy.deepcopy(self.master).to(model_of(self.drafter).dtype)

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.master.parameters(), lr=self._learning_rate, weight_decay=0.0)

    def _loss(self, lesson: Lesson) -> Tensor:
        """The sum of the divergence over a lesson's places. The row before a place guesses its token."""
        device, width = self.master.device, self.drafter.lm.vocab_size
        rows = torch.tensor(lesson.places, device=device) - 1
        tokens = torch.tensor([lesson.tokens], device=device)
        logits = self.master(input_ids=tokens, use_cache=False, logits_to_keep=rows).logits[0]
        taught = torch.stack(lesson.logits).to(device)
        return self._divergence(taught[:, :width], logits[:, :width]).sum()

    def _unused_copy(self, used: Collection[object]) -> LanguageModel | RecurrentModel | None:
        """A copy of the draft model that no running request uses; a new one if there are few."""
        busy = [getattr(drafter, "lm", None) for drafter in used]
        for replica in self._replicas:
            if not any(replica is lm for lm in busy):
                return replica
        if len(self._replicas) == REPLICAS:
            return None
        self._replicas.append(replica_of(self.drafter.lm))
        if len(self._replicas) == REPLICAS:
            # Nothing is copied from it any more, so that its memory can be freed.
            self._first = None
        return self._replicas[-1]


def model_of(drafter: ModelDrafter) -> PreTrainedModel:
    """The draft model itself."""
    model: PreTrainedModel = drafter.lm.model  # type: ignore[attr-defined]
    return model


def master_of(model: PreTrainedModel) -> PreTrainedModel:
    """A trainable copy of a model in float32; of a model in float64, in float64."""
    with torch.inference_mode(False):
        master = copy.deepcopy(model)
        if master.dtype != torch.float64:
            master = master.float()
    return master.eval().requires_grad_(True)


def replica_of(lm: object) -> LanguageModel | RecurrentModel:
    """A copy of a language model, with slots and weights of its own, whose weights may change.

    It never runs from a library or a graph, because these hold the weights that they were made of.
    """
    if not isinstance(lm, LanguageModel | RecurrentModel):
        raise TypeError(f"a {type(lm).__name__} has no weights to learn")
    with torch.inference_mode(False):
        model = copy.deepcopy(lm.model)
    forward = "packed" if getattr(lm, "forward", "eager") != "eager" and packable(model) else "eager"
    return as_lm(
        model,
        max_slots=lm.max_slots,
        max_context=lm.max_context,
        vocab_size=lm.vocab_size,
        pad_to=lm.pad_to,
        forward=forward,  # type: ignore[arg-type]
        lasting=False,
    )
