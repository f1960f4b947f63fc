"""Key-values kept from turn to turn or shared in a group, against reading each prompt from its beginning."""

import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, set_seed

from helpers.tiny import LORA, tiny_gpt2, tiny_model, tiny_opt, tiny_qwen3
from hfppo.generation.generate import TransformersSampler
from hfppo.generation.key_values import find_continued
from hfppo.generation.sampler import Sampling
from hfppo.models.actor_critic import ActorCritic
from hfppo.support.padding import pad_left

EOS, VOCAB_SIZE = list(range(1, 6)), 26
SHAPE = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3},
    **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
}


def model_of(name, **config):
    set_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SHAPE, **config}))


def vision_language_model(name):
    """One that keeps its batch's `rope_deltas` beside its key-values; its text part alone is of interest."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {**SHAPE, "num_key_value_heads": 1, "head_dim": 16, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    set_seed(0)
    return AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(name, text_config=text, vision_config=vision, image_token_id=24, video_token_id=25)
    )


MODELS = {
    "llama": tiny_model,
    "eager": lambda: tiny_model(attn_implementation="eager"),
    "gpt2": tiny_gpt2,
    "opt": tiny_opt,
    "qwen3": tiny_qwen3,
    "gpt_neox": lambda: model_of("gpt_neox"),
    "bloom": lambda: model_of("bloom"),
    "qwen2_5_vl": lambda: vision_language_model("qwen2_5_vl"),
    "glm4v": lambda: vision_language_model("glm4v"),
}


OTHER_CACHES = [
    ("mistral", {"sliding_window": 4, "num_key_value_heads": 1, "head_dim": 16}),
    ("gemma2", {"sliding_window": 4, "num_key_value_heads": 1, "head_dim": 16}),
    ("lfm2", {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 1}),
]


def sampler_of(base, batch_size=64, lora=LORA):
    """A sampler from a base with an adapter that changes it, and a list of its forwards' shapes."""
    model = ActorCritic(base, lora, critic=None).eval()
    set_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    sampler = TransformersSampler(model, Sampling(1.0, 8, EOS, 0), batch_size)
    shapes = []
    base.get_input_embeddings().register_forward_hook(lambda module, args, output: shapes.append(tuple(args[0].shape)))
    return sampler, shapes


def play(sampler, keep, greedy=False, rows=6, turns=4):
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
            seeds = None if greedy else [10 * turn + row for row in playing]
            completions = sampler(*pad_left([tokens[row] for row in playing], 0), seeds, budgets)
            for i, row in enumerate(playing):
                mask = completions.mask[i]
                logprobs[row, len(tokens[row])] = completions.logprobs[i][mask]
                tokens[row] += completions.ids[i][mask].tolist() + some(1 + (row + 2 * turn) % 5)
    return tokens, logprobs


def read_tokens(shapes):
    """How many tokens the forwards read that read several at once."""
    return [rows * width for rows, width in shapes if width > 1]


def assert_same(played, expected):
    assert played[0] == expected[0]
    assert played[1].keys() == expected[1].keys()
    for key, told in played[1].items():
        assert_close(told, expected[1][key], rtol=0, atol=1e-5, msg=str(key))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_turns_are_those_of_reading_from_the_beginning(make):
    sampler, shapes = sampler_of(make())
    expected = play(sampler, False)
    anew = read_tokens(shapes)
    shapes.clear()
    assert_same(play(sampler, True), expected)
    first, *others = read_tokens(shapes)
    assert first == anew[0]
    assert len(others) == 3
    assert max(others) <= 4 * 6  # of four rows an answer of five tokens and the token before it


def test_greedy_turns_are_those_of_reading_from_the_beginning():
    sampler, _ = sampler_of(tiny_model())
    assert_same(play(sampler, True, greedy=True), play(sampler, False, greedy=True))


@pytest.mark.parametrize(("name", "config"), OTHER_CACHES)
def test_windows_and_recurrent_states_are_not_kept(name, config):
    sampler, shapes = sampler_of(model_of(name, **config))
    expected = play(sampler, False)
    anew = read_tokens(shapes)
    shapes.clear()
    assert_same(play(sampler, True), expected)
    assert read_tokens(shapes) == anew


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_rows_of_several_batches_are_kept_once_they_are_one(batch_size):
    """Six rows play, then four, two and one."""
    sampler, shapes = sampler_of(tiny_model(), batch_size)
    expected = play(sampler, False)
    anew = read_tokens(shapes)
    shapes.clear()
    assert_same(play(sampler, True), expected)
    spared = [tokens < whole for tokens, whole in zip(read_tokens(shapes), anew, strict=True)]
    assert sum(spared) == {1: 0, 2: 1, 3: 1, 4: 2}[batch_size]  # turns after one whose rows were one batch
    assert play(sampler_of(tiny_model())[0], True)[0] == expected[0]


def sample(sampler, prompts, budgets=(3,) * 10):
    return sampler(*pad_left(prompts, 0), list(range(len(prompts))), budgets and budgets[: len(prompts)])


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
        completions = sample(sampler, prompts)
        prompts = [
            prompt + ids[mask].tolist() + [14]
            for prompt, ids, mask in zip(prompts, completions.ids, completions.mask, strict=True)
        ]
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
    assert sampler.turn_cache.kept is None
    with sampler.ready():
        sampler(*pad_left(prompts, 0), [0, 1])
        assert sampler.turn_cache.kept is None
        sample(sampler, prompts)
        cache = weakref.ref(sampler.turn_cache.kept.cache)
        assert cache() is not None
    assert cache() is None


# Two groups of four, and between them prompts that padding alone makes alike.
GROUPS = [[7, 8, 9, 10, 11]] * 4 + [[12, 13], [0, 0, 0, 12, 13]] + [[7, 8, 9, 14, 15]] * 4


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("budgets", [None, (3, 1, 2, 3, 2, 1, 1, 2, 3, 3)], ids=["single", "turns"])
def test_a_prompt_that_rows_share_is_read_once(make, budgets):
    sampler, shapes = sampler_of(make())
    told = sample(sampler, GROUPS, budgets)
    assert shapes[:2] == [(4, 5), (10, 1)]
    shapes.clear()
    apart = torch.tensor([0, 6, 1, 7, 2, 8, 3, 9, 4, 5])
    ids, mask = pad_left(GROUPS, 0)
    limits = None if budgets is None else [budgets[row] for row in apart]
    expected = sampler(ids[apart], mask[apart], apart.tolist(), limits).rows(apart.argsort())
    assert shapes[0] == (10, 5)
    assert told.mask.equal(expected.mask)
    assert told.ids[told.mask].equal(expected.ids[told.mask])
    assert_close(told.logprobs[told.mask], expected.logprobs[told.mask], rtol=0, atol=1e-5)


def test_the_first_turn_of_a_group_is_read_once_and_kept():
    sampler, shapes = sampler_of(tiny_model())
    with sampler.ready():
        completions = sample(sampler, GROUPS)
        assert read_tokens(shapes) == [4 * 5]
        prompts = [
            prompt + ids[mask].tolist() + [14]
            for prompt, ids, mask in zip(GROUPS, completions.ids, completions.mask, strict=True)
        ]
        told = sample(sampler, prompts)
        assert max(read_tokens(shapes)[1:]) <= 2 * 10  # the last token of an answer, and the one after it
    assert told.ids.equal(sample(sampler, prompts).ids)


@pytest.mark.parametrize(("name", "config"), OTHER_CACHES)
def test_other_caches_are_not_shared_and_not_tried_again(name, config):
    sampler, shapes = sampler_of(model_of(name, **config))
    prompts = [[7, 8, 9, 10, 11]] * 6
    told = sample(sampler, prompts)
    assert read_tokens(shapes) == [5, 6 * 5]
    shapes.clear()
    assert sample(sampler, prompts).ids.equal(told.ids)
    assert read_tokens(shapes) == [6 * 5]


def test_states_without_key_values_are_not_shared():
    shape = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    sampler, shapes = sampler_of(model_of("mamba2", **shape), lora=replace(LORA, target_modules=["in_proj"]))
    told = sample(sampler, [[7, 8, 9, 10, 11]] * 6)
    shapes.clear()
    assert sample(sampler, [[7, 8, 9, 10, 11]] * 6).ids.equal(told.ids)
    assert read_tokens(shapes) == [6 * 5]


@pytest.mark.parametrize("prompts", [[[7]] * 4, [[7, 8, 9], [7, 8, 9], [10, 11, 12], [13, 14, 15]]])
def test_prompts_are_read_by_row_where_little_would_be_saved(prompts):
    sampler, shapes = sampler_of(tiny_model())
    sample(sampler, prompts)
    assert shapes[0] == (4, len(prompts[0]))


@pytest.mark.parametrize("seeds", [range(6), None], ids=["sampled", "greedy"])
def test_a_group_may_be_cut_by_batches(seeds):
    """Of six rows that share a prompt, in batches of four and two."""
    sampler, shapes = sampler_of(tiny_model(), 4)
    prompts = pad_left([[7, 8, 9, 10]] * 6, 0)
    told = sampler(*prompts, seeds and list(seeds))
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 4), (1, 4)]
    expected = sampler_of(tiny_model(), 1)[0](*prompts, seeds and list(seeds))
    assert told.mask.equal(expected.mask)
    assert told.ids[told.mask].equal(expected.ids[told.mask])


def test_a_later_turn_that_begins_otherwise_is_shared():
    sampler, shapes = sampler_of(tiny_model())
    with sampler.ready():
        sample(sampler, GROUPS)
        shapes.clear()
        told = sample(sampler, [[20, 21, 22, 23]] * 6)
    assert shapes[:2] == [(1, 4), (6, 1)]
    assert told.ids.equal(sample(sampler, [[20, 21, 22, 23]] * 6).ids)


def test_prompts_find_their_rows_in_order():
    kept = [[5, 6], [5], [7], [7]]
    assert find_continued(kept, [[5, 6, 1], [5, 6, 2], [7, 3], [7, 3]]) == [0, 1, 2, 3]
    assert find_continued(kept, [[5, 8], [7]]) == [1, 2]
    assert find_continued(kept, [[7, 3], [5, 6, 1]]) is None
    assert find_continued(kept, [[7], [7], [7]]) is None
