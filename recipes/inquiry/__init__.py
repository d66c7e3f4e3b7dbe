"""What recipes that test published claims share: their methods are counted or timed on a pair, and judged."""
