"""KV caches continued in stretches and turns, or shared, against one call of `generate` from the beginning."""

import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from gpu_memory import LiveStorages
from torch.testing import assert_close
from transformers import set_seed

from helpers.scripted import padded_turns
from helpers.tiny import LORA, tiny_gpt2, tiny_model, tiny_of_type, tiny_opt, tiny_vision_model
from hfppo.generation import generate, key_values
from hfppo.generation.generate import TransformersSampler
from hfppo.generation.sampler import Sampling
from hfppo.models.actor_critic import ActorCritic

EOS, VOCAB_SIZE = list(range(1, 6)), 26


@pytest.fixture(autouse=True)
def calls_cost_nothing(monkeypatch):
    """So that a few tokens are worth another call of `generate`."""
    monkeypatch.setattr(key_values, "CALL", 0)


# Keeps its batch's `rope_deltas` beside its key-values.
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MODELS = {
    "llama": tiny_model,
    "gpt2": tiny_gpt2,
    "opt": tiny_opt,
    "bloom": lambda: tiny_of_type("bloom"),
    "qwen2_5_vl": lambda: tiny_vision_model(
        "qwen2_5_vl", model_type="qwen2_5_vl_text", num_key_value_heads=1, rope_parameters=ROPE
    ),
}


OTHER_CACHES = [
    ("mistral", {"sliding_window": 4, "head_dim": 16}),
    ("gemma2", {"sliding_window": 4, "head_dim": 16}),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}),
]


def sampler_of(base, batch_size=64, lora=LORA, max_tokens=8, eos_ids=EOS):
    """A sampler from a base with an adapter that changes it, and a list of its forwards' shapes."""
    model = ActorCritic(base, lora, critic=None).eval()
    set_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    sampler = TransformersSampler(model, Sampling(1.0, max_tokens, eos_ids, 0), batch_size)
    shapes = []
    base.get_input_embeddings().register_forward_hook(lambda module, args, output: shapes.append(tuple(args[0].shape)))
    return sampler, shapes


def play(sampler, keep, rows=6, turns=4):
    """Return each row's tokens, and log-probs by row and start of a turn.

    Rows leave after each turn; turns and answers have all lengths.
    """
    random = torch.Generator().manual_seed(0)

    def some(n):
        return torch.randint(6, VOCAB_SIZE, (n,), generator=random).tolist()

    tokens, logprobs = [some(3 + 2 * row % 7) for row in range(rows)], {}
    with sampler.ready() if keep else nullcontext():
        for turn in range(turns):
            playing = [row for row in range(rows) if row % turns >= turn]
            budgets = [1 + (row + turn) % 8 for row in playing]
            seeds = [10 * turn + row for row in playing]
            turns_of = sampler([tokens[row] for row in playing], seeds, budgets)
            for row, taken in zip(playing, turns_of, strict=True):
                logprobs[row, len(tokens[row])] = torch.tensor(taken.logprobs)
                tokens[row] += taken.ids + some(1 + (row + 2 * turn) % 5)
    return tokens, logprobs


def read_tokens(shapes):
    """How many tokens the forwards read that read several at once."""
    return [rows * width for rows, width in shapes if width > 1]


def assert_same(played, expected):
    assert played[0] == expected[0]
    assert played[1].keys() == expected[1].keys()
    for key, told in played[1].items():
        assert_close(told, expected[1][key], rtol=0, atol=1e-5, msg=str(key))


@pytest.mark.parametrize(("name", "stretch"), [*((name, 2) for name in MODELS), ("llama", 32)])
def test_turns_are_those_of_reading_from_the_beginning(name, stretch, monkeypatch):
    """In stretches of two tokens, rows of a turn end at different times, and all go on in the next turn."""
    sampler, shapes = sampler_of(MODELS[name]())
    expected = play(sampler, False)
    monkeypatch.setattr(generate, "CHUNK", stretch)
    anew = read_tokens(shapes)
    shapes.clear()
    assert_same(play(sampler, True), expected)
    first, *others = read_tokens(shapes)
    assert first == anew[0]
    assert len(others) == 3
    assert max(others) <= 4 * 6  # of four rows an answer of five tokens and the token before it


@pytest.mark.parametrize(("name", "config"), OTHER_CACHES)
def test_windows_and_recurrent_states_are_not_kept(name, config):
    sampler, shapes = sampler_of(tiny_of_type(name, **config))
    expected = play(sampler, False)
    anew = read_tokens(shapes)
    shapes.clear()
    assert_same(play(sampler, True), expected)
    assert read_tokens(shapes) == anew


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_rows_of_several_batches_are_kept_once_they_are_one(batch_size):
    """Six rows play, then four, two and one."""
    sampler, shapes = sampler_of(tiny_model(), batch_size)
    expected = play(sampler, False)
    anew = read_tokens(shapes)
    shapes.clear()
    assert_same(play(sampler, True), expected)
    spared = [tokens < whole for tokens, whole in zip(read_tokens(shapes), anew, strict=True)]
    assert sum(spared) == {1: 0, 3: 1, 4: 2}[batch_size]  # turns after one whose rows were one batch
    assert play(sampler_of(tiny_model())[0], True)[0] == expected[0]


def sample(sampler, prompts, budgets=(3,) * 10):
    return padded_turns(sampler(prompts, list(range(len(prompts))), budgets and budgets[: len(prompts)]))


def answered(prompts, completions):
    """The prompts of the next turn: their completions and an answer of a token follow."""
    rows = zip(prompts, completions.ids, completions.mask, strict=True)
    return [prompt + ids[mask].tolist() + [14] for prompt, ids, mask in rows]


def in_one_call(sampler, *given):
    """Completions of one call of `generate` for each batch, which reads all prompts from their beginnings."""
    sampler.may_reuse = False
    turns = sampler(*given)
    sampler.may_reuse = True
    return padded_turns(turns)


def assert_equal(told, expected):
    assert told.mask.equal(expected.mask)
    assert told.truncated.equal(expected.truncated)
    assert told.ids[told.mask].equal(expected.ids[told.mask])
    assert_close(told.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_turns_stay_in_one_batch_though_the_first_ones_key_values_fill_memory(monkeypatch):
    """On a GPU that finds room for 8 rows before them, and for none beside them."""
    expected = play(sampler_of(tiny_model())[0], keep=True)
    room = iter([8])
    monkeypatch.setattr("hfppo.generation.generate.sampler_rows", lambda *args: next(room))
    assert_same(play(sampler_of(tiny_model(), batch_size=None)[0], keep=True), expected)


def test_a_prompt_that_begins_otherwise_is_read_from_its_beginning():
    sampler, shapes = sampler_of(tiny_model())
    prompts = [[7, 8, 9, 10], [11, 12, 13]]
    with sampler.ready():
        prompts = answered(prompts, sample(sampler, prompts))
        prompts[1][0] = 12
        shapes.clear()
        told = sample(sampler, prompts)
    assert shapes[0] == (2, max(map(len, prompts)))
    expected = sample(sampler, prompts)
    assert told.ids.equal(expected.ids)
    assert told.logprobs.equal(expected.logprobs)


def test_nothing_is_kept_for_single_turns_nor_after_sampling():
    sampler, _ = sampler_of(tiny_model())
    prompts = [[7, 8, 9, 10], [11, 12, 13]]
    sample(sampler, prompts)
    assert not sampler.rows
    with sampler.ready():
        sampler(prompts, [0, 1])
        assert not sampler.rows
        sample(sampler, prompts)
        cache = weakref.ref(sampler.rows[0].key_values.cache)
        assert cache() is not None
    assert cache() is None


# Two groups of four, and between them prompts that padding alone makes alike.
GROUPS = [[7, 8, 9, 10, 11]] * 4 + [[12, 13], [0, 0, 0, 12, 13]] + [[7, 8, 9, 14, 15]] * 4


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("budgets", [None, (3, 1, 2, 3, 2, 1, 1, 2, 3, 3)], ids=["single", "turns"])
def test_what_rows_begin_with_is_read_once(make, budgets):
    """First three tokens of the groups together, then the rest of each group's prompt."""
    sampler, shapes = sampler_of(make())
    told = sample(sampler, GROUPS, budgets)
    assert shapes[:3] == [(3, 3), (4, 2), (10, 1)]
    shapes.clear()
    assert_equal(told, in_one_call(sampler, GROUPS, list(range(10)), budgets))
    assert shapes[0] == (10, 5)


SYSTEMS = [list(range(6, 6 + n)) for n in (12, 7)]


def test_beginnings_of_several_kinds_are_each_read_once():
    """Two instructions of other lengths; a prompt that is the longer one's beginning; one that begins as no other."""
    prompts = [SYSTEMS[0] + [20 + n] * (2 + n) for n in range(3)] + [[*SYSTEMS[1], 19, 18 - n] for n in range(3)]
    prompts += [SYSTEMS[0], SYSTEMS[0][:5], [25, 24]]
    sampler, shapes = sampler_of(tiny_model())
    told = sample(sampler, prompts)
    read = sum(read_tokens(shapes))
    shapes.clear()
    assert_equal(told, in_one_call(sampler, prompts, list(range(9)), [3] * 9))
    assert read_tokens(shapes) == [9 * 16]
    assert read < 0.8 * 9 * 16


MAMBA = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}


@pytest.mark.parametrize(("name", "config"), [*OTHER_CACHES, ("mamba2", MAMBA)])
def test_other_caches_are_not_shared_and_not_tried_again(name, config):
    lora = replace(LORA, target_modules=["in_proj"]) if name == "mamba2" else LORA
    sampler, shapes = sampler_of(tiny_of_type(name, **config), lora=lora)
    prompts = [[7, 8, 9, 10, 11]] * 6
    told = sample(sampler, prompts)
    assert name == "mamba2" or read_tokens(shapes) == [5, 6 * 5]
    shapes.clear()
    assert sample(sampler, prompts).ids.equal(told.ids)
    assert read_tokens(shapes) == [6 * 5]


RAGGED = [[6 + (3 * row + n) % 20 for n in range(2 + 5 * row % 8)] for row in range(12)]


BUDGETS = [1 + 7 * row % 16 for row in range(12)]


@pytest.mark.parametrize("budgets", [None, BUDGETS], ids=["one limit", "budgets"])
def test_stretches_draw_what_one_call_draws(budgets, monkeypatch):
    """Twelve rows in five places; no row is computed for more than the three tokens of a stretch after its end."""
    sampler, shapes = sampler_of(tiny_gpt2(), batch_size=5, max_tokens=16, eos_ids=[1, 2, 3])
    given = RAGGED, list(range(12)), budgets
    expected = in_one_call(sampler, *given)
    at_once = sum(rows for rows, width in shapes if width == 1)
    shapes.clear()
    monkeypatch.setattr(generate, "CHUNK", 3)
    monkeypatch.setattr(key_values, "CALL", 1000)
    assert_equal(padded_turns(sampler(*given)), expected)
    assert max(rows for rows, _ in shapes) == 5
    lengths = expected.mask.sum(dim=1)
    assert int(lengths.min()) + 6 < int(lengths.max())
    computed = sum(rows for rows, width in shapes if width == 1)
    assert int((lengths - 1).sum()) <= computed <= int((lengths + 2).sum())
    assert computed < at_once


@pytest.mark.parametrize(("in_turns", "short"), [(False, 13), (True, 20)])
def test_stretches_need_no_more_memory_than_one_call(short, in_turns, monkeypatch):
    """Eight rows in four places, or in one turn; only one layer's key-values may be in memory twice.

    Of completions of 13 tokens, key-values move at the 16th, shortly before the peak.
    """
    base = tiny_model(num_hidden_layers=8)
    lora = replace(LORA, target_modules=["q_proj"])
    sampler, _ = sampler_of(base, 8 if in_turns else 4, lora, eos_ids=[VOCAB_SIZE])
    monkeypatch.setattr(generate, "CHUNK", 8)
    given = [[row + 6] * (row + 3) for row in range(8)], list(range(8)), [20, short] * 4
    peaks = []
    for call in (partial(in_one_call, sampler), sampler):
        with sampler.ready() if in_turns else nullcontext():
            peaks.append(LiveStorages(torch.Tensor).peak_of(partial(call, *given)))
    assert peaks[1] < 1.01 * peaks[0]  # the token ids are there once more
