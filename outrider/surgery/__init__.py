"""Draft models that are cut out of a target: fewer experts, or another shape."""
