"""Sampling: pure, each row by its own seed, and with an end that is found without looking at padding."""

from contextlib import nullcontext

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from torch.testing import assert_close
from transformers import GenerationConfig, PreTrainedTokenizerFast

from helpers.formulas import bits
from helpers.runs import SMALL, count_digits
from helpers.scripted import padded_turns
from helpers.tiny import LORA, tiny_model
from hfppo import PPOConfig, PPOTrainer, Rollout
from hfppo.generation import generate
from hfppo.generation.generate import BELOW_ONE, draw
from hfppo.generation.sampler import eos_token_ids
from hfppo.generation.stop_strings import StopStrings
from hfppo.models import batch_size
from hfppo.models.actor_critic import ActorCritic
from hfppo.sample import Turn


def sample(trainer, prompts, seeds):
    ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    trainer.model.eval()
    return padded_turns(trainer.collector.sampler(ids, seeds))


def test_a_completion_depends_on_its_own_seed_alone(make_trainer):
    """Not on its neighbours, its place in the batch or the padding they bring."""
    trainer = make_trainer()
    together = sample(trainer, ["1+2=", "请问10+20=", "3="], [11, 12, 13])
    for row, (prompt, seed) in enumerate([("1+2=", 11), ("请问10+20=", 12), ("3=", 13)]):
        alone = sample(trainer, [prompt], [seed])
        n = int(together.mask[row].sum())
        assert torch.equal(together.ids[row, :n], alone.ids[0, :n])
    assert not torch.equal(sample(trainer, ["1+2="], [12]).ids, sample(trainer, ["1+2="], [11]).ids)


def test_sampling_follows_the_models_distribution(make_trainer):
    """Frequencies of the first token over 4000 seeds against the softmax at temperature 0.7."""
    trainer = make_trainer({"temperature": 0.7, "max_completion_length": 1})
    prompt = trainer.processing_class("1+2=")["input_ids"]
    with torch.no_grad():
        expected = (trainer.model.eval()(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    n = 4000
    drawn = sample(trainer, ["1+2="] * n, list(range(n))).ids[:, 0]
    frequencies = torch.bincount(drawn, minlength=26) / n
    assert expected.max() < 0.9, "a peaked distribution would show little"
    assert_close(frequencies, expected, rtol=0, atol=4 * (0.25 / n) ** 0.5)


def test_greedy_is_generates_own_greedy(make_trainer):
    trainer = make_trainer()
    ours = sample(trainer, ["1+2=", "请问10+20="], None)
    for row, prompt in enumerate(["1+2=", "请问10+20="]):
        ids = torch.tensor([trainer.processing_class(prompt)["input_ids"]])
        theirs = trainer.model.generate(
            input_ids=ids, do_sample=False, max_new_tokens=6, eos_token_id=1, pad_token_id=0
        )
        n = int(ours.mask[row].sum())
        assert ours.ids[row, :n].tolist() == theirs[0, ids.shape[1] :].tolist()


def test_the_models_generation_config_does_not_leak_in(make_trainer):
    """Qwen2.5's config for instance asks for a repetition penalty and top-k 20, which are not the policy."""
    impure = tiny_model()
    impure.generation_config = GenerationConfig(
        do_sample=True, top_k=1, top_p=0.1, repetition_penalty=5.0, min_new_tokens=6, temperature=0.1, eos_token_id=1
    )
    trainer, plain = make_trainer(model=impure), make_trainer()
    prompts, seeds = ["1+2="] * 20, list(range(20))
    assert torch.equal(sample(trainer, prompts, seeds).ids, sample(plain, prompts, seeds).ids)
    assert trainer.model.causal_lm.generation_config.repetition_penalty == 5.0, "it must be put back"


def test_end_of_completions():
    ids = torch.tensor([[5, 1, 1, 1], [5, 6, 7, 8], [1, 5, 1, 0], [5, 6, 7, 2]])
    found = padded_turns([Turn.up_to_end(row, [1.0] * 4, eos_ids=[1, 2]) for row in ids.tolist()])
    assert found.mask.equal(bits("1100", "1111", "1000", "1111"))
    assert found.truncated.tolist() == [False, True, False, False]
    assert found.logprobs.sum(dim=1).tolist() == [2, 4, 1, 4]


@pytest.mark.parametrize(("configured", "expected"), [(None, [1]), (5, [1, 5]), ([5, 6], [1, 5, 6]), ([1], [1])])
def test_eos_ids_are_the_tokenizers_and_the_models(tokenizer, configured, expected):
    assert eos_token_ids(tokenizer, GenerationConfig(eos_token_id=configured)) == expected


@pytest.mark.parametrize("vocab_size", [1, 65, 20_000])
def test_tokens_are_drawn_as_often_as_their_probability_says(vocab_size):
    """Evenly spaced numbers fall on a token in proportion to its probability, unlikely ones included."""
    logits = 3 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    probabilities = logits.softmax(dim=-1)
    number = 20_000
    uniforms = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    tokens = torch.cat([draw(probabilities.expand(len(u), -1), u[:, None]) for u in uniforms.split(1000)])
    assert_close(tokens, tokens.sort(dim=0).values)
    counts = torch.bincount(tokens.flatten(), minlength=vocab_size).double()
    assert float((counts - number * probabilities.double()).abs().max()) <= 1.1


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, BELOW_ONE])
def test_a_token_without_probability_is_never_drawn(uniform):
    for vocab_size in (7, 64, 200):
        for only in (0, vocab_size // 2, vocab_size - 1):
            probabilities = torch.zeros(1, vocab_size)
            probabilities[0, only] = 0.3  # rounding may leave less than 1
            assert draw(probabilities, torch.tensor([[uniform]], dtype=torch.float64)).item() == only


@pytest.mark.parametrize("tiny", [1e-17, 1.2e-16, 3e-16, 5e-16])
def test_no_rounding_draws_a_token_without_probability(tiny):
    """Beside a token of probability 1, the ends of a tiny one's interval are rounded to where it is not."""
    probabilities = torch.zeros(1, 192)
    probabilities[0, 1], probabilities[0, 66] = 1.0, tiny
    for steps in range(8):
        uniforms = torch.tensor([[BELOW_ONE - steps * 2.0**-53]], dtype=torch.float64)
        assert draw(probabilities, uniforms).item() in (1, 66)


def test_equal_prompts_that_are_looked_at_are_a_group(make_trainer):
    trainer = make_trainer({"advantage_estimator": "grpo", "num_generations": 4, "kl_coef": 0.0})
    rollout = trainer.rollout(["1+1=", "2+2=", "1+1=", "1+1=", "2+2="])
    first = rollout.advantages[:, 0]
    for rows in ([0, 2, 3], [1, 4]):
        assert rollout.scores[rows].unique().numel() > 1
        assert first[rows].abs().min() > 0
        assert first[rows].sum().item() == pytest.approx(0.0, abs=1e-5)


def test_equal_prompts_with_other_columns_are_no_group(make_trainer):
    """In one group their advantages would be −4 and 4."""
    trainer = make_trainer(
        {"advantage_estimator": "rloo", "num_generations": 2, "kl_coef": 0.0},
        reward_funcs=lambda answer, **_: [float(x) for x in answer],
    )
    assert not trainer.rollout(["1+1=", "1+1="], answer=["1", "5"]).advantages.any()


def assert_same(one: Rollout, other: Rollout) -> None:
    """Equal tokens, and equal numbers but for rounding."""
    for name in ("prompt_ids", "completion_ids"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    for name, tolerance in (("rollout_logprobs", 1e-5), ("old_logprobs", 1e-5), ("advantages", 1e-4)):
        assert_close(getattr(one, name), getattr(other, name), rtol=tolerance, atol=tolerance)


@pytest.fixture
def gpu_memory(monkeypatch):
    """Set what torch finds free on a GPU, in bytes, beside 0.3 MB of its own with 0.1 MB in use."""

    def free(size: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size, 2 * size))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300_000)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100_000)

    return free


GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_rows_on_a_gpu_fill_half_of_the_free_memory(gpu_memory):
    """Key-values: 2 · 2 layers · 16 · 2 bytes = 128 per token; reading: (8 · 32 + 4 · 48) · 2 bytes = 896."""
    model = ActorCritic(tiny_model(num_key_value_heads=1).to(torch.bfloat16), LORA, critic=None)
    gpu_memory(1_000_000)  # half of 1.2 MB is 600 kB; a row of 16 · 128 + 10 · 896 + 26 · 24 bytes has 11.6 kB
    assert batch_size.sampler_rows(model, None, 10, 6, GPU) == 32
    assert batch_size.pass_rows(model, None, torch.tensor([16]), GPU) == 32  # of 14.3 kB
    assert batch_size.sampler_rows(model, None, 10_000, 6, GPU) == 1  # of 10 MB
    gpu_memory(80 * 10**9)
    assert batch_size.pass_rows(model, None, torch.tensor([1000]), GPU) == 65  # 65,536 tokens
    assert batch_size.sampler_rows(model, None, 100, 60, GPU) == 2**18


def test_a_given_number_of_rows_is_obeyed_and_elsewhere_the_default_is_64(gpu_memory):
    gpu_memory(1)
    model = ActorCritic(tiny_model(), LORA, critic=None)
    assert batch_size.sampler_rows(model, 7, 10, 6, GPU) == 7
    assert batch_size.pass_rows(model, 7, torch.tensor([16]), GPU) == 7
    assert batch_size.sampler_rows(model, None, 4000, 6, CPU) == 64
    assert batch_size.pass_rows(model, None, torch.tensor([4]), CPU) == 64
    assert batch_size.pass_rows(model, None, torch.tensor([100]), CPU) == 10  # 1024 tokens
    alike = torch.tensor([500, 400]), CPU, torch.tensor([0, 300])  # 300 of their own in the mean
    assert batch_size.pass_rows(model, None, *alike) == 13  # 4096 tokens
    assert batch_size.pass_rows(model, 7, *alike) == 7
    torch.use_deterministic_algorithms(True)
    try:
        assert batch_size.sampler_rows(model, None, 10, 6, GPU) == 64
    finally:
        torch.use_deterministic_algorithms(False)


def note_batches(trainer, monkeypatch, note) -> None:
    """Call a function with each batch that the sampler samples."""
    sampler = trainer.collector.sampler
    sample = sampler._sample
    monkeypatch.setattr(sampler, "_sample", lambda batch, *others: (note(batch), sample(batch, *others)))


def test_prompts_of_about_one_length_are_sampled_together(make_trainer, monkeypatch):
    """So that a long one makes no padding for all; each keeps its place and its numbers."""
    widths = []
    prompts = ["1=", "12+34+56+78=", "2=", "3+4=", "12+34+56+7=", "5+6="]
    rollouts = []
    for size in (64, 2):
        trainer = make_trainer({"local_rollout_forward_batch_size": size})
        note_batches(trainer, monkeypatch, lambda rows: widths.append((len(rows), max(len(r.tokens) for r in rows))))
        trainer.collector.sampler.on_progress = (shares := []).append
        rollouts.append(trainer.rollout(prompts))
        assert shares == sorted(shares)
        assert 0.5 < shares[-1] <= 1
    assert widths == [(6, 12), (2, 12), (2, 4), (2, 2)]
    assert_same(*rollouts)


class FirstDigits(PPOTrainer):
    """Completes every prompt with the same two tokens; lacks some rows on request."""

    rows = slice(None)

    def create_sampler(self, eos_ids):
        def sample(prompts, seeds):
            return [Turn([5, eos_ids[0]], [-1.0, -1.0])] * len(prompts[self.rows])

        sample.ready = nullcontext
        return sample


def test_a_sampler_of_a_users_own_completes_the_prompts_or_is_told(tmp_path, tokenizer, dataset):
    args = PPOConfig(output_dir=str(tmp_path), **SMALL)
    trainer = FirstDigits(tiny_model(), count_digits, args, dataset, processing_class=tokenizer)
    trainer.train()
    rollout = trainer.rollout(["1+1=", "2+2="])
    assert rollout.completion_ids[:, 0].tolist() == [5, 5]
    assert rollout.lengths.sub(rollout.prompt_mask.sum(dim=1)).tolist() == [2, 2]
    trainer.rows = slice(1, None)
    with pytest.raises(ValueError, match="sampler function returned 1 turns for 2 prompts"):
        trainer.rollout(["1+1=", "2+2="])


@pytest.mark.parametrize(("ids", "logprobs"), [([], []), ([5, 6], [-1.0])])
def test_a_turn_has_tokens_and_a_logprob_for_each(ids, logprobs):
    with pytest.raises(ValueError, match=f"a turn of {len(ids)} tokens has {len(logprobs)} log-probs"):
        Turn(ids, logprobs)


class Pieces:
    """A tokenizer whose tokens are bytes."""

    def __init__(self, *tokens: bytes):
        self.tokens = tokens

    def __call__(self, text, **_):
        return {"input_ids": []}

    def batch_decode(self, rows, **_):
        return [b"".join(self.tokens[i] for i in ids).decode(errors="replace") for ids in rows]


TOKENS = Pieces(b"ab", b"cd", b"e", "é".encode()[:1], "é".encode()[1:], b"")


@pytest.mark.parametrize(
    ("strings", "ids", "end"),
    [
        (("bc",), [2, 0, 1, 2], 3),  # begins and ends within tokens
        (("e",), [0, 2, 2], 2),
        (("abcde",), [0, 1, 2, 2], 3),
        (("é",), [0, 3, 4, 2], 3),  # a character of two tokens
        (("cd", "ab"), [2, 0, 1], 2),  # the first that occurs, not the first of the list
        (("ce",), [0, 1, 2], 0),
        (("eab",), [2, 5, 5, 0, 1], 4),  # with tokens without text in it
    ],
)
def test_the_end_by_a_stop_string_by_hand(strings, ids, end):
    assert StopStrings(TOKENS, strings).end(ids) == end


@pytest.mark.parametrize(
    ("string", "end"), [(" 12", 2), ("12", 2), (" 1", 1), ("  1", 0), ("2 1", 3), ("你", 6), ("1你", 6)]
)
def test_a_stop_string_may_begin_with_the_space_that_a_decoder_strips(string, end):
    """As Llama 2's strips it at the start of a text."""
    characters = {f"<0x{byte:02X}>": 4 + i for i, byte in enumerate("你".encode())}
    vocabulary = {"<unk>": 0, "▁": 1, "1": 2, "▁1": 3, **characters, "2": 7}
    made = Tokenizer(models.BPE(vocabulary, [("▁", "1")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    assert StopStrings(tokenizer, (string,)).end([3, 7, 3, 4, 5, 6]) == end


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("stretch", [32, 2])
def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(make_trainer, greedy, stretch, monkeypatch):
    """Also if it began in an earlier stretch."""
    monkeypatch.setattr(generate, "CHUNK", stretch)
    prompts = ["1+2=", "请问10+20=", "3=", "4=", "5=", "6="]
    seeds = None if greedy else list(range(len(prompts)))
    free = make_trainer({"max_completion_length": 24})
    decode = free.processing_class.decode
    whole = sample(free, prompts, seeds)
    texts = [[decode([t]) for t in row[m].tolist()] for row, m in zip(whole.ids, whole.mask, strict=True)]
    strings = ["".join(texts[0][3:5]), "".join(texts[1][7:10])]  # of two and of three tokens
    # The prompt's last sign and a completion's first one are no match.
    strings.append("=" + texts[2][0])
    trainer = make_trainer({"max_completion_length": 24, "generation_kwargs": {"stop_strings": strings}})
    stopped = sample(trainer, prompts, seeds)
    ends = []
    for row, signs in enumerate(texts):
        ends.append(next((n for n in range(1, len(signs) + 1) if any(s in "".join(signs[:n]) for s in strings)), None))
        length = int(stopped.mask[row].sum())
        assert length == (ends[row] or len(signs))
        assert torch.equal(stopped.ids[row, :length], whole.ids[row, :length])
        assert_close(stopped.logprobs[row, :length], whole.logprobs[row, :length])
        assert bool(stopped.truncated[row]) == (ends[row] is None and bool(whole.truncated[row]))
    assert ends[0] is not None
    assert ends[1] is not None


def test_a_stop_token_ends_a_completion(make_trainer):
    prompts, seeds = ["1+2="] * 8, list(range(8))
    whole = sample(make_trainer({"max_completion_length": 16}), prompts, seeds)
    stop = int(whole.ids[0, 4])
    trainer = make_trainer({"max_completion_length": 16, "generation_kwargs": {"stop_token_ids": [stop]}})
    stopped = sample(trainer, prompts, seeds)
    rows = [ids[mask].tolist() for ids, mask in zip(whole.ids, whole.mask, strict=True)]
    expected = [Turn.up_to_end(ids, [0.0] * len(ids), [1, stop]) for ids in rows]
    assert stopped.mask.sum(dim=1).tolist() == [len(turn.ids) for turn in expected]
    assert stopped.truncated.tolist() == [turn.truncated for turn in expected]
    assert not stopped.truncated[0]
    with pytest.raises(ValueError, match=r"\['stop_token_ids'\] has token id 1000, but the model's 26 token ids"):
        make_trainer({"generation_kwargs": {"stop_token_ids": [1000]}})
