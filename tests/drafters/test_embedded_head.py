"""The head that ships with the package drafts well for the target that ships with it, and changes no output."""

import outrider
from outrider.core.types import Sampling
from outrider.embedded import ASSETS, EMBEDDED_HEAD
from outrider.heads.trunks.features import FeatureDrafter

MEGABYTE = 1 << 20
PROMPT = "Once upon a time, there was a little girl named Lily. She liked to"


def test_it_is_recognised_and_emits_what_the_target_says_in_few_steps():
    greedy = Sampling(temperature=0.0)
    said = {}
    for drafter in ("none", str(EMBEDDED_HEAD)):
        engine = outrider.load(drafter=drafter, length="fixed:5", dtype="float32", max_slots=1)
        [said[drafter]] = engine.generate([PROMPT], max_new_tokens=96, sampling=greedy, ignore_eos=True)
    assert isinstance(engine.parts.drafter, FeatureDrafter)
    assert said[str(EMBEDDED_HEAD)].tokens == said["none"].tokens
    assert 96 / said[str(EMBEDDED_HEAD)].num_steps > 2.5


def test_what_ships_fits_into_a_wheel_of_60_megabytes():
    assert sum(file.stat().st_size for file in ASSETS.rglob("*")) < 60 * MEGABYTE
