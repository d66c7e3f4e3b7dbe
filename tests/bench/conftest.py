"""What is measured is checked first; the law of dice has tests of its own."""

from tests.world.dice_draws import fewer_draws_in_all  # noqa: F401
