"""Steering: the vectors at the start, and the files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.core.types import InputError
from outrider.drafters.steering import (
    CONFIG,
    WEIGHTS,
    Steering,
    SteeringConfig,
    read_steering,
    usual_taps,
    write_steering,
)

SIZES = SteeringConfig(taps=(6, 4, 1), target_layers=8, target_size=5, widths=(7, 3))


def noisy(config: SteeringConfig = SIZES) -> Steering:
    """A steering whose weights are all drawn."""
    steering = Steering(config)
    with torch.no_grad():
        for weight in steering.parameters():
            weight.normal_()
    return steering


@pytest.mark.parametrize("rank", [None, 2])
def test_at_the_start_the_states_are_summed_and_nothing_is_added(rank):
    steering = Steering(SteeringConfig(taps=(6, 4, 1), target_layers=8, target_size=5, widths=(7, 3), rank=rank))
    taps = {tap: torch.randn(4, 5) for tap in (1, 4, 6)}
    states = steering.concatenate(taps)
    assert torch.equal(states, torch.cat([taps[6], taps[4], taps[1]], -1))
    assert torch.allclose(steering.gather(states), taps[1] + taps[4] + taps[6], atol=1e-6)
    vectors = steering(states)
    assert vectors.shape == (4, 10)
    assert not vectors.any()
    vectors.sum().backward()
    assert steering.inject.weight.grad.any()


@pytest.mark.parametrize("rank", [None, 2])
def test_the_vectors_of_single_layers_are_parts_of_those_of_all(rank):
    steering = noisy(SteeringConfig(taps=(6, 4, 1), target_layers=8, target_size=5, widths=(7, 3), rank=rank))
    states = torch.randn(2, 3, 15)
    layers = steering.layers(steering.project(states))
    assert torch.allclose(torch.cat([layers(0), layers(1)], -1), steering(states), atol=1e-6)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_steering_that_was_written_is_read_again(tmp_path, rank):
    steering = noisy(SteeringConfig(taps=(6, 4, 1), target_layers=8, target_size=5, widths=(7, 3), rank=rank))
    write_steering(steering, tmp_path, torch.float32)
    again = read_steering(str(tmp_path))
    states = torch.randn(2, 15)
    assert again.config == steering.config
    assert torch.equal(again(states), steering(states))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CONFIG, WEIGHTS])


def test_a_folder_without_a_steering_says_what_writes_one(tmp_path):
    with pytest.raises(InputError, match="outrider train steer"):
        read_steering(str(tmp_path))


def test_a_steering_with_another_convention_of_taps_is_refused(tmp_path):
    write_steering(noisy(), tmp_path, torch.float32)
    described = json.loads((tmp_path / CONFIG).read_text())
    assert "convention" in described
    (tmp_path / CONFIG).write_text(json.dumps(described | {"convention": "outputs of layers"}))
    with pytest.raises(InputError, match="outputs of layers"):
        read_steering(str(tmp_path))


@pytest.mark.parametrize("damage", ["config", "weights", "tensor", "shape"])
def test_damaged_files_are_named(tmp_path, damage):
    write_steering(noisy(), tmp_path, torch.float32)
    if damage == "config":
        (tmp_path / CONFIG).write_text('{"format": 1}')
    elif damage == "weights":
        (tmp_path / WEIGHTS).write_bytes(b"no tensors")
    else:
        tensors = load_file(tmp_path / WEIGHTS)
        if damage == "tensor":
            del tensors["norm.bias"]
        else:
            tensors["norm.bias"] = torch.zeros(6)
        save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(InputError, match=CONFIG if damage == "config" else WEIGHTS):
        read_steering(str(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"taps": ()}, "taps"), ({"taps": (1, 1)}, "taps"), ({"taps": (9,)}, r"0\.\.8"), ({"rank": 0}, "rank")],
)
def test_sizes_that_make_no_sense_are_refused(wrong, message):
    sizes = {"taps": (1,), "target_layers": 8, "target_size": 5, "widths": (7,)}
    with pytest.raises(InputError, match=message):
        SteeringConfig(**(sizes | wrong))


def test_the_usual_taps_are_different_states_of_every_target():
    for layers in range(1, 100):
        taps = usual_taps(layers)
        assert len(set(taps)) == len(taps)
        assert all(0 < tap <= layers for tap in taps)
        assert list(taps) == sorted(taps, reverse=True)
