"""The options of the commands that train kin of EAGLE heads, beside those of EAGLE heads themselves."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GriffinOptions:
    """What a GRIFFIN head can be told beside what an EAGLE head can be told.

    Attributes:
        align_top: A draft token counts as aligned if it is among this many likeliest tokens of the head.
        align_shift: Learn behind aligned tokens as the paper says (1), or one token later as its authors' code does
            (0). By default 1.
        likeliest: Weight of the cross-entropy over the target's ten likeliest tokens; the divergence has weight 1. The
            paper's later stages have 5.
    """

    align_top: int = 3
    align_shift: int = 1
    likeliest: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JakiroOptions:
    """What a Jakiro head can be told beside what an EAGLE head can be told.

    Attributes:
        expert_size: Width of each expert's feed-forward. By default the target's hidden size.
        contrast: Weight of the guess that reaches one token further; the other guess has weight 1.
        mixture: What is mixed for a guess: the experts' outputs (features), or their distributions by the gate's
            weights (gate) or by halves (half).
    """

    expert_size: int | None = None
    contrast: float = 0.5
    mixture: str = "features"


@dataclass(frozen=True, kw_only=True)
class PossOptions:
    """What a head with position specialists can be told.

    Attributes:
        trunk: The head whose layer is the first specialist: eagle or eagle3.
        stride: Draft steps of each specialist.
        unrolled: How many draft tokens are learnt. There are unrolled / stride specialists.
        regression: Weight of the distance between the head's features and the target's, of eagle alone.
        noise: Strength of the noise on the target's features.
        bias: Give the fusion a bias, as the authors do; of eagle alone.
        taps: The target's hidden states that eagle3 reads, such as 2x16x29; tap k enters layer k. By default a low, a
            middle and a high one.
        fc_norm: Norm each of these states; of eagle3 alone, as the next two.
        norm_output: Take the normed output as the next feature.
        norm_before_residual: Take the normed feature as the residual.
        intermediate_size: Width of the feed-forward. By default the target's.
    """

    trunk: str = "eagle"
    stride: int = 1
    unrolled: int = 6
    regression: float = 10.0
    noise: float = 0.2
    bias: bool = False
    taps: str | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    intermediate_size: int | None = None
