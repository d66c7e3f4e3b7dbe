"""The acceptance of a configuration as a file for other tools."""

import json
from pathlib import Path
from typing import Any

from outrider.bench.side_by_side import metrics
from outrider.bench.side_by_side.served import Served
from outrider.bench.side_by_side.session import Measurement
from outrider.bench.side_by_side.verdict import chief, of_way
from outrider.core import files
from outrider.core.inputs import InputError


def profile(measurement: Measurement) -> dict[str, Any]:
    """The acceptance of the fastest configuration: a speculation profile, and vLLM's synthetic acceptance rates.

    The fields are those that NVIDIA's Model-Optimizer proposes, so that a simulator of another engine can take them.
    `synthetic_acceptance_rates` are what vLLM's option of that name wants: marginal rates that do not increase, one for
    each draft token.

    Raises:
        InputError: No configuration drafted anything.

    References:
        https://github.com/NVIDIA/Model-Optimizer/issues/2247
    """
    best = chief(measurement)
    rows = [] if best is None else of_way(measurement.rows, best.way, best.load)
    requests = [Served.read(each) for row in rows for each in row["served"]]
    if best is None or not metrics.drafting(requests):
        raise InputError("no configuration drafted anything, so there is no acceptance to export; leave out --export")
    longest = max(step.drafted for step in metrics.drafting(requests))
    marginal = metrics.marginal_acceptance(requests)
    marginal += [0.0] * (longest - len(marginal))
    return {
        "method": best.way,
        "num_speculative_tokens": longest,
        "conditional_accept_rates": metrics.conditional_acceptance(requests),
        "marginal_accept_rates": marginal,
        "mean_accept_length": metrics.acceptance_length(requests),
        "mean_accept_length_per_request": metrics.mean_acceptance_length(requests),
        "acceptance_length_histogram": {
            str(accepted + 1): count for accepted, count in enumerate(metrics.acceptance_histogram(requests))
        },
        "measurement_conditions": {
            "dataset": measurement.workload.name,
            "dataset_sha256": measurement.workload.sha256,
            "osl": measurement.plan.generation.max_new_tokens,
            "num_samples": len(requests),
            "temperature": None
            if measurement.plan.generation.sampling is None
            else measurement.plan.generation.sampling.temperature,
            "target": measurement.target,
        },
        "synthetic_acceptance_rates": marginal,
    }


def write_profile(measurement: Measurement, file: Path) -> None:
    """Write the profile. Raises InputError if there is none, or the file cannot be written."""
    text = json.dumps(profile(measurement), indent=2) + "\n"
    with files.written(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        files.replace(file, text.encode())
