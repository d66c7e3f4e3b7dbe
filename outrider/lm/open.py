"""Put a transformers model behind the interface that the engine uses, in the way that its layers need."""

from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.host.versions import warn_of_untested
from outrider.lm.choice import choose
from outrider.lm.forwards.forward import Forward
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.model import LanguageModel
from outrider.lm.recurrent import RecurrentModel


def as_lm(
    model: PreTrainedModel,
    *,
    max_slots: int,
    max_context: int | None = None,
    vocab_size: int | None = None,
    pad_to: int | None = 1,
    forward: Forward | None = "eager",
    lasting: bool = True,
    overcommit: bool = False,
) -> LanguageModel | RecurrentModel:
    """The model as the engine sees it, in the way that its layers need.

    Recurrent layers are never padded, and models with such layers never compiled or packed.

    Args:
        pad_to: Fewest columns of a forward; None chooses.
        forward: How forwards run; None chooses.
        lasting: Whether the weights will stay as they are.
        overcommit: Whether a `max_context` may be asked for that does not fit for all slots at once.
    """
    warn_of_untested()
    if not Anatomy.of(model).recurrent:
        lm = LanguageModel(
            model,
            max_slots=max_slots,
            max_context=max_context,
            vocab_size=vocab_size,
            pad_to=pad_to or 1,
            forward=forward or "eager",
            overcommit=overcommit,
        )
        lm.choice = choose(lm, forward=forward, pad_to=pad_to, lasting=lasting)
        return lm
    if forward not in (None, "eager"):
        raise InputError(f"{model.config.model_type} has recurrent layers and runs as it is; choose forward=eager")
    return RecurrentModel(
        model, max_slots=max_slots, max_context=max_context, vocab_size=vocab_size, overcommit=overcommit
    )
