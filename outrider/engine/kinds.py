"""Where each token of a step comes from: an accepted draft token, a recovered token, a bonus token, or no draft."""

from typing import Literal

from outrider.core.types import Step

Kind = Literal["accepted", "recovered", "bonus", "plain"]


def kinds(step: Step) -> list[Kind]:
    """The kind of each token that a step emitted.

    The target draws a recovered token where it rejects a draft token, and a bonus token behind a draft that it accepts
    to its end. A step without a draft emits one plain token.

    Example:
        >>> from outrider.core.types import Timing
        >>> rejected = Step(
        ...     request="a", num_draft_tokens=3, num_accepted_tokens=1, tokens=(5, 7), timing=Timing(), num_requests=1
        ... )
        >>> kinds(rejected)
        ['accepted', 'recovered']
    """
    if not step.num_draft_tokens:
        return ["plain"] * len(step.tokens)
    accepted = min(step.num_accepted_tokens, len(step.tokens))
    kept: list[Kind] = ["accepted"] * accepted
    following: list[Kind] = ["bonus" if step.bonus else "recovered"]
    return kept + following * (len(step.tokens) - accepted)
