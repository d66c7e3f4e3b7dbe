"""The drafters of the catalog: names, classes and papers."""

from outrider.core.row import LEVIATHAN, Row
from outrider.drafters.assistant import AssistantPath
from outrider.drafters.blockwise_path import BlockwisePath
from outrider.drafters.hydra import HydraPath
from outrider.drafters.medusa import MedusaPath
from outrider.drafters.mlp_speculator import MLPSpeculatorPath
from outrider.drafters.model import ModelPath
from outrider.drafters.mtp import MtpPath
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.steered import SteeredPath
from outrider.drafters.suffix import SuffixDrafter

DRAFTERS = (
    Row(family="drafter", name="none", home=NoDrafter, summary="plain decoding", source="-"),
    Row(
        family="drafter",
        name="ngram",
        home=NgramDrafter,
        summary="continue the longest, most recent match of the context's end",
        source="Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding",
    ),
    Row(
        family="drafter",
        name="suffix",
        home=SuffixDrafter,
        summary="continue the longest repeated suffix, by a suffix automaton of context and corpus",
        source="Oliaro et al. 2024, SuffixDecoding, https://arxiv.org/abs/2411.04975",
    ),
    Row(
        family="drafter",
        name="model",
        home=ModelPath,
        summary="a smaller LM; its tokenizer may differ",
        source=LEVIATHAN,
    ),
    Row(
        family="drafter",
        name="steered",
        home=SteeredPath,
        summary="a smaller LM that the target's hidden states steer",
        source="Berdoz et al. 2025, SD², https://arxiv.org/abs/2511.09844",
    ),
    Row(
        family="drafter",
        name="blockwise",
        home=BlockwisePath,
        summary="small heads on the target's last hidden state; a small LM or an n-gram model may refine their draft",
        source="Stern et al. 2018, https://arxiv.org/abs/1811.03115; Kim et al. 2024, https://arxiv.org/abs/2404.09221",
    ),
    Row(
        family="drafter",
        name="mtp",
        home=MtpPath,
        summary="the multi-token-prediction layers in the target's own checkpoint",
        source="DeepSeek-AI 2024, DeepSeek-V3, https://arxiv.org/abs/2412.19437",
    ),
    Row(
        family="drafter",
        name="assistant",
        home=AssistantPath,
        summary="the assistant that was published with a target: Gemma 4's or Muse Glimmer's",
        source="Google 2026, https://huggingface.co/docs/transformers/model_doc/gemma4_assistant",
    ),
    Row(
        family="drafter",
        name="medusa",
        home=MedusaPath,
        summary="heads that each guess one depth from the target's last hidden state",
        source="Cai et al. 2024, Medusa, https://arxiv.org/abs/2401.10774",
    ),
    Row(
        family="drafter",
        name="hydra",
        home=HydraPath,
        summary="medusa heads that read the draft tokens before; with a prefix layer it is Hydra++",
        source="Ankner et al. 2024, Hydra, https://arxiv.org/abs/2402.05109",
    ),
    Row(
        family="drafter",
        name="mlp_speculator",
        home=MLPSpeculatorPath,
        summary="a recurrent state that reads the target's last state, then the draft token by token",
        source="Wertheimer et al. 2024, https://arxiv.org/abs/2404.19124",
    ),
    Row(
        family="drafter",
        name="eagle",
        home="outrider.heads.eagle:SPEC",
        summary="a layer that continues the target's last features; with tree `dynamic` it is EAGLE-2",
        source="Li et al. 2024, EAGLE, https://arxiv.org/abs/2401.15077",
    ),
    Row(
        family="drafter",
        name="eagle3",
        home="outrider.heads.eagle3:SPEC",
        summary="a layer that continues three fused hidden states of the target",
        source="Li et al. 2025, EAGLE-3, https://arxiv.org/abs/2503.01840",
    ),
    Row(
        family="drafter",
        name="poss",
        home="outrider.heads.poss:SPEC",
        summary="eagle or eagle3 with a specialist for each part of a draft",
        source="Huang et al. 2025, PosS, https://arxiv.org/abs/2506.03566",
    ),
    Row(
        family="drafter",
        name="griffin",
        home="outrider.heads.griffin:SPEC",
        summary="eagle with a fusion that the token guides, and a guess apart from the feature",
        source="Hu et al. 2025, GRIFFIN, https://arxiv.org/abs/2502.11018",
    ),
    Row(
        family="drafter",
        name="jakiro",
        home="outrider.heads.jakiro:SPEC",
        summary="eagle with two small experts, whose contrast guesses the deepest tokens without a forward",
        source="Huang et al. 2025, Jakiro, https://arxiv.org/abs/2502.06282",
    ),
    Row(
        family="drafter",
        name="parallel",
        home="outrider.heads.parallel:SPEC",
        summary="a layer that guesses all tokens of a draft in one forward, at learnt mask slots",
        source="ParallelSpec 2024, https://arxiv.org/abs/2410.05589",
    ),
    Row(
        family="drafter",
        name="dflash",
        home="outrider.heads.dflash:SPEC",
        summary="a head that guesses a block of tokens in one forward, each without the others",
        source="DFlash 2026, https://arxiv.org/abs/2602.06036",
    ),
    Row(
        family="drafter",
        name="dflare",
        home="outrider.heads.dflare:SPEC",
        summary="dflash with a mixture of the target's layers for each layer of the head",
        source="Tencent 2026, https://github.com/Tencent/AngelSlim",
    ),
    Row(
        family="drafter",
        name="dspark",
        home="outrider.heads.dspark:SPEC",
        summary="dflash with a sequential head that corrects each guess by the token before it",
        source="DeepSeek 2026, https://arxiv.org/abs/2607.05147",
    ),
)
