"""Episodes of several conversations: the tape of their calls, worked by hand, and the rows that models read."""

import pytest
import torch
from torch.testing import assert_close

from helpers.scripted import always
from hfppo import PPOConfig
from hfppo import functional as F
from hfppo.collect.credit import CreditAssignment
from hfppo.collect.forward import Passes
from hfppo.data.prompts import Row
from hfppo.learn.loss import LossTerm, ppo_loss, surrogate
from hfppo.learn.micro_batches import Counts, MiniBatchSize, cut_mini_batch
from hfppo.rewards.functions import RewardFunctions
from hfppo.rewards.reward_func import RewardBatch
from hfppo.rollout import Rollout
from hfppo.sample import Ended, Sample, pad

# An episode as two lines: "s" for a sampled token and "c" for context, and the conversation of each token.
COMPACTED = ("sscssccss", "000001111")  # the third call reads a new prompt of two tokens
INTERLEAVED = ("sscccssscs", "0011111100")  # a sub-agent with a prompt of three tokens, and one token for its answer
PLAIN = ("ss", "00")


def sample(written: str, conversation: str, group: int = 0) -> Sample:
    """An episode whose prompt is token 7, and whose other tokens are numbered from 10."""
    made = Sample(Row({"prompt": "7"}, [7], number=0, group=group, seed=0), turns=1, ended=Ended.STOPPED)
    for token, kind in enumerate(written, 10):
        made.append([token], [-1.0] if kind == "s" else None)
    made.conversation = [int(number) for number in conversation]
    return made


def credit(episodes, scores, by_row=None, **config) -> Rollout:
    """Return the rollout of episodes; `by_row` are the critic's values of their conversations."""
    args = PPOConfig(output_dir="unused", use_cpu=True, kl_coef=0.0, whiten_advantages=False, **config)
    samples = [sample(*episode, group=0) for episode in episodes]
    RewardFunctions([always(*scores)])(RewardBatch(samples))
    sequences = pad(samples, 0, several_turns=True)
    values = None if by_row is None else sequences.tape.collect(torch.tensor(by_row))
    passes = Passes(sequences.rollout_logprobs, None, values, None, None)
    return CreditAssignment(args, 0.0, F.whiten, [1.0])(samples, sequences, passes).rollout


def test_a_row_for_each_conversation_in_the_order_of_its_tokens():
    rows = credit([INTERLEAVED, PLAIN], [1.0, 0.0], [[0.0] * 5] * 3).by_conversation()
    assert rows.prompt_ids[:, -1].tolist() == [7, 12, 7]  # a later conversation begins with its first token
    assert rows.completion_ids.tolist() == [[10, 11, 18, 19, 0], [13, 14, 15, 16, 17], [10, 11, 0, 0, 0]]
    assert rows.real.sum(dim=1).tolist() == [4, 5, 2]
    assert rows.mask.int().tolist() == [[1, 1, 0, 1, 0], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert rows.lengths.tolist() == [5, 6, 3]
    assert rows.scores.tolist() == [1.0, 1.0, 0.0]
    assert rows.share.tolist() == [0.5, 0.5, 1.0]
    one = credit([PLAIN], [1.0], [[0.5, 0.25]])
    assert all(x.equal(getattr(one, name)) for name, x in one.by_conversation().tensors().items() if name != "share")


def test_the_critic_reads_its_own_prompt_before_each_conversation():
    made = [sample(*COMPACTED), sample(*PLAIN)]
    for one, prompt in zip(made, ([1, 2], [3]), strict=True):
        one.row.__dict__["critic_prompt_ids"] = prompt
    rows = pad(made, 0, several_turns=True).by_conversation()
    read = rows.joined()
    shown = [
        ids[mask].tolist() for ids, mask in zip(read["critic_input_ids"], read["critic_attention_mask"], strict=True)
    ]
    assert shown == [[1, 2, 10, 11, 12, 13, 14], [1, 2, 15, 16, 17, 18], [3, 10, 11]]


# Values of the rows and advantages by token, calculated by hand; context has a value that must not matter.
VALUES = [[0.4, 0.5, 9.0, 0.6, 0.3], [9.0, 0.7, 0.8, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("config", "first", "second"),
    [
        # R − V, R = 1
        ({"lam": 1.0}, [0.6, 0.5, 0.0, 0.4, 0.7], [0.3, 0.2]),
        # δ is 0.1, 0.1, −0.3, 0.4, 0.1, 0.2, and A = δ + 0.95·A of the next token
        ({"lam": 0.95}, [0.503407, 0.424639, 0.0, 0.341725, 0.6755], [0.29, 0.2]),
        # A = δ + 0.5·A of the next call after calls 1 and 2: 0.4 + 0.5·0.3 = 0.55
        ({"lam": 1.0, "lam_turn": 0.5}, [0.325, 0.225, 0.0, 0.25, 0.55], [0.3, 0.2]),
    ],
)
def test_credit_flows_from_one_conversation_to_the_next(config, first, second):
    rows = credit([COMPACTED], [1.0], VALUES, **config).by_conversation()
    assert_close(rows.advantages, torch.tensor([first, [0.0, *second, 0.0, 0.0]]), atol=1e-6, rtol=0)


def test_credit_of_a_sub_agent_between_two_calls():
    """γ is 0.5 from one call to the next: the sub-agent's first V counts half for the first call."""
    values = [[0.2, 0.4, 9.0, 0.8, 0.0], [9.0, 9.0, 0.6, 0.3, 0.5]]
    rows = credit([INTERLEAVED], [1.0], values, lam=0.0, gamma_turn=0.5).by_conversation()
    # 0.4 − 0.2, 0.5·0.6 − 0.4; 0.3 − 0.6, 0.5 − 0.3, 0.5·0.8 − 0.5; 1 − 0.8
    expected = torch.tensor([[0.2, -0.1, 0.0, 0.2, 0.0], [0.0, 0.0, -0.3, 0.2, -0.1]])
    assert_close(rows.advantages, expected)


def test_groups_compare_episodes_and_not_conversations():
    grpo = {"advantage_estimator": "grpo", "num_generations": 2}
    rows = credit([INTERLEAVED, PLAIN], [1.0, 0.0], **grpo).by_conversation()
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert_close(rows.advantages, half * (rows.mask * torch.tensor([[1.0], [1.0], [-1.0]])))


def test_gspo_has_a_ratio_for_each_conversation():
    """Means of log π − log π_old by hand: 0.2 in the first, −0.1 in the second; 0.1 in the episode."""
    rows = credit([COMPACTED], [1.0], [[0.0] * 5] * 2).by_conversation()
    moved = torch.tensor([[0.3, 0.1, 9.0, 0.2, 0.2], [9.0, -0.3, 0.1, 0.0, 0.0]])
    loss = surrogate(rows.old_logprobs + moved, rows, "gspo", F.Clip(0.9, 0.9))
    expected = -torch.tensor([[0.2], [-0.1]]).exp() * rows.mask
    assert_close(loss * rows.mask, expected)


def test_the_end_of_an_episode_is_that_of_its_last_call():
    tape = pad([sample(*COMPACTED), sample(*INTERLEAVED), sample(*PLAIN)], 0, True).tape
    assert tape.collect(torch.tensor([1, 2, 3, 4, 5])).tolist() == [2, 3, 5]


@pytest.mark.parametrize("reduction", F.losses.REDUCTIONS)
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_an_episode_weighs_the_same_in_one_conversation_and_in_several(make_trainer, reduction, pieces):
    args = make_trainer({"loss_reduction": reduction, "max_completion_length": 10}).args
    whole = credit([INTERLEAVED, PLAIN], [1.0, 0.0], [[0.0] * 5] * 3)
    size = MiniBatchSize(Counts(8.0, 2.0), Counts(8.0, 2.0))

    def loss(part: Rollout) -> float:
        per_token = part.completion_ids.float().square()
        terms = [LossTerm("policy/loss", 1.0, per_token), LossTerm("value/loss", 0.5, per_token, of_critic=True)]
        return float(ppo_loss(terms, part, size, args, critic_only=False))

    cut = whole.by_conversation().micro_batches(pieces)
    assert [len(piece) for piece in cut] == {1: [3], 2: [1, 2], 3: [1, 1, 1]}[pieces]
    assert sum(map(loss, cut)) == pytest.approx(loss(whole), rel=1e-6)


def test_a_mini_batch_has_all_conversations_of_its_episodes(make_trainer):
    rollout = credit([INTERLEAVED, PLAIN, COMPACTED, PLAIN], [0.0, 1.0, 2.0, 3.0], [[0.0] * 5] * 6)
    trainer = make_trainer()
    minis = [rollout.mini_batch(index, 2, (0,)) for index in range(2)]
    assert sorted(float(score) for mini in minis for score in mini.scores) == [0.0, 1.0, 2.0, 3.0]
    for mini in minis:
        ((only, other), *rest) = (
            cut["pieces"] for cut in cut_mini_batch(trainer.model, mini, 1, None, trainer.accelerator)
        )
        assert not rest
        assert sum(len(piece) for piece in (only, other)) == len(mini.by_conversation())
    assert MiniBatchSize.of(rollout, trainer.accelerator).actor == (16, 4)
