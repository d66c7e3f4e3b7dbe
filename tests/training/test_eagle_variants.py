"""What GRIFFIN, Jakiro and PosS learn beside what all heads learn."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from outrider.core.types import InputError
from outrider.heads.eagle import EagleObjective
from outrider.heads.griffin import WithLikeliest
from outrider.heads.objective import GuessObjective, LearntPositions
from outrider.learning.batch import TrainBatch
from outrider.learning.divergences import ForwardKl
from tests.training.test_heads import GAMMA, batch, learnt_logits, target
from tests.world.learners import head_learner
from tests.world.zoo import VOCAB


def kept_places(objective: GuessObjective, train_batch: TrainBatch) -> list[set[tuple[int, int]]]:
    """The places at which each guess is learnt."""
    kept, places_of_guesses = None, []
    with torch.no_grad():
        for number, hidden in enumerate(objective.guesses(objective.with_states(train_batch), objective.num_guesses)):
            places = LearntPositions.of(train_batch, number, kept)
            places_of_guesses.append(set(zip(places.rows.tolist(), places.at.tolist(), strict=True)))
            kept = objective.kept(train_batch, hidden, number, kept)
    return places_of_guesses


@pytest.mark.parametrize(("shift", "top"), [(1, 3), (0, 3), (1, 48), (0, 48)])
def test_a_griffin_learns_behind_aligned_tokens_alone(shift, top):
    train_batch = batch()
    objective = head_learner("griffin", target(), loss="fkl", unrolled=GAMMA, align_top=top, align_shift=shift)
    logits, places_of_guesses = learnt_logits(objective, train_batch), kept_places(objective, train_batch)
    likely = [each.argsort(-1, descending=True)[..., :top] for each in logits]
    for number in range(GAMMA):
        expected = set()
        for row, count in enumerate(train_batch.lengths.tolist()):
            for at in range(count - 2 - number):
                compared = at + 1 - shift
                aligned = all(
                    int(train_batch.tokens[row, compared + 2 + before]) in likely[before][row, compared].tolist()
                    for before in range(number)
                )
                if train_batch.learnt[row, at + 2 + number] and aligned:
                    expected.add((row, at))
        assert places_of_guesses[number] == expected
    everything = [
        set(zip(*(x.tolist() for x in (p.rows, p.at)), strict=True))
        for p in (LearntPositions.of(train_batch, number) for number in range(GAMMA))
    ]
    assert places_of_guesses[0] == everything[0]
    assert places_of_guesses[-1] < everything[-1]
    assert top == 3 or places_of_guesses[-1]


@pytest.mark.parametrize("shift", [0, 1])
def test_a_griffin_that_counts_every_token_as_likely_learns_everywhere(shift):
    train_batch = batch()
    objective = head_learner("griffin", target(), loss="fkl", unrolled=GAMMA, align_top=VOCAB, align_shift=shift)
    counts = [len(each) for each in kept_places(objective, train_batch)]
    assert counts == [len(LearntPositions.of(train_batch, number).labels) for number in range(GAMMA)]


def test_the_regressed_half_has_no_gradient_from_the_guess_of_its_own_pass():
    objective = head_learner("griffin", target(), loss="fkl", regression=0.0)
    objective(batch()).total.backward()
    gradient = objective.head.layers[0].mlp.down_proj.weight.grad
    size = objective.head.feature_size
    assert not gradient[size:].any()
    assert gradient[:size].any()


def test_the_likeliest_tokens_count_once_more():
    dice = torch.Generator().manual_seed(0)
    theirs, ours = torch.randn(4, VOCAB, generator=dice), torch.randn(4, VOCAB, generator=dice)
    p, q = theirs.softmax(-1), ours.softmax(-1)
    extra = [-sum(float(p[i, v] * q[i, v].log()) for v in p[i].argsort(descending=True)[:10]) for i in range(4)]
    expected = ForwardKl()(theirs, ours) + 5 * torch.tensor(extra)
    assert torch.allclose(WithLikeliest(of=ForwardKl(), weight=5.0)(theirs, ours), expected, atol=1e-5)


def test_a_jakiro_learns_both_guesses_of_each_pass():
    train_batch, share = batch(), 0.25
    objective = head_learner("jakiro", target(), loss="fkl", unrolled=2, contrast=share, regression=2.0, decay=0.5)
    assert isinstance(objective, EagleObjective)
    model, head = target(), objective.head
    with torch.no_grad():
        learnt = objective(train_batch)
        theirs = model(train_batch.tokens, use_cache=False).logits
        whole = objective.with_states(train_batch)
        wanted, total, weight = objective.last_states(whole), 0.0, 0.0
        for number, hidden in enumerate(objective.guesses(whole, 2)):
            for further, vectors in enumerate((head.next_feature(hidden), head.contrast(hidden))):
                for row, count in enumerate(train_batch.lengths.tolist()):
                    for at in range(count - 2 - number - further):
                        to = at + 1 + number + further
                        if not train_batch.learnt[row, to + 1]:
                            continue
                        guess = model.lm_head(vectors[row, at])
                        loss = ForwardKl()(theirs[row, to][None], guess[None]) + 2 * smooth_l1_loss(
                            vectors[row, at], wanted[row, to]
                        )
                        total += float(loss) * 0.5**number * (share if further else 1)
                        weight += 0.0 if further else 0.5**number
    assert float(learnt.weight) == pytest.approx(weight)
    assert float(learnt.total) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("trunk", ["eagle", "eagle3"])
def test_specialists_begin_as_their_parent_and_learn_apart(tmp_path, trunk):
    train_batch = batch()
    parent = head_learner(trunk, target(), loss="fkl", unrolled=GAMMA)
    parent.context = replace(parent.context, dtype=torch.float32)
    parent.write(tmp_path)
    objective = head_learner("poss", target(), loss="fkl", unrolled=GAMMA, init_from=str(tmp_path))
    assert objective.head.num_specialists == GAMMA
    for mine, theirs in zip(learnt_logits(objective, train_batch), learnt_logits(parent, train_batch), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    objective(train_batch).total.backward()
    layers = [objective.head.first.layers, *objective.head.further]
    gradients = [each[0].self_attn.k_proj.weight.grad for each in layers]
    assert all(gradient.any() for gradient in gradients)
    assert not torch.allclose(gradients[0], gradients[1])


def test_specialists_of_eagle3_have_its_norms_and_keep_them_on_disk(tmp_path):
    norms, train_batch = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}, batch()
    objective = head_learner("poss", target(), trunk="eagle3", unrolled=GAMMA, **norms)
    with torch.no_grad():
        for name, weight in objective.head.named_parameters():
            if "norm" in name:
                weight.mul_(torch.linspace(0.5, 2.0, weight.numel()))
    objective.context = replace(objective.context, dtype=torch.float32)
    objective.write(tmp_path)
    again = head_learner("poss", target(), unrolled=GAMMA, init_from=str(tmp_path))
    for before, after in zip(learnt_logits(objective, train_batch), learnt_logits(again, train_batch), strict=True):
        assert torch.allclose(before, after, atol=1e-5)
    plain = head_learner("poss", target(), trunk="eagle3", unrolled=GAMMA)
    assert len(list(plain.head.named_parameters())) < len(list(objective.head.named_parameters()))
    with pytest.raises(InputError, match="for trunk eagle3 alone"):
        head_learner("poss", target(), **norms)


def test_wrong_sizes_are_refused_in_one_sentence(tmp_path):
    for make, wrong, message in [
        ("griffin", {"align_shift": 2}, "align_shift must be one of 0, 1"),
        ("griffin", {"align_top": 0}, "align_top must be >= 1"),
        ("griffin", {"likeliest": -1.0}, "likeliest must be >= 0"),
        ("jakiro", {"contrast": -1.0}, "contrast must be >= 0"),
        ("jakiro", {"mixture": "both"}, "mixture must be one of features, gate, half"),
        ("poss", {"trunk": "medusa"}, "trunk must be one of eagle, eagle3"),
        ("poss", {"stride": 0}, "stride must be >= 1"),
        ("poss", {"stride": 3, "unrolled": 2}, "unrolled must be >= 3, got 2"),
    ]:
        with pytest.raises(InputError, match=message):
            head_learner(make, target(), **wrong)
    objective = head_learner("poss", target(), unrolled=6, stride=2)
    objective.write(tmp_path)
    with pytest.raises(InputError, match=r"unrolled must be >= 5"):
        head_learner("poss", target(), unrolled=4, init_from=str(tmp_path))
