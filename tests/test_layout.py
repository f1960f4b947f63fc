"""Layouts, output heads and cuts: each way of computing gives what the plain model gives, and the same gradients."""

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from helpers.runs import disturb, logged, stops_at_kl, trainable
from helpers.scripted import padded_turns
from helpers.tiny import lora, tiny_gpt2, tiny_model, tiny_of_type, tiny_opt, tiny_qwen3
from hfppo import ActorCritic
from hfppo.generation.generate import TransformersSampler
from hfppo.generation.sampler import Sampling
from hfppo.models import actor_critic, output_head
from hfppo.models import layout as packing_module
from hfppo.models.actor_critic import Want
from hfppo.models.layout import Layout, Rows, can_pack, can_share, lay_out
from hfppo.models.loading import default_peft_config
from hfppo.rollout import balanced_sizes, sizes_within

PROMPTS = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6], [0, 0, 0, 7]])
COMPLETIONS = torch.tensor([[8, 9, 1, 0, 0], [8, 1, 0, 0, 0], [9, 10, 11, 12, 13]])
IDS = torch.cat([PROMPTS, COMPLETIONS], dim=1)
MASK = torch.tensor([[True] * n + [False] * (5 - n) for n in (3, 2, 5)])
ATTENTION = torch.cat([PROMPTS != 0, MASK], dim=1)


def actor(base=None, peft_config=None, critic="adapter") -> ActorCritic:
    return disturb(ActorCritic(base or tiny_model(seed=1), peft_config or default_peft_config(), critic))


def outputs(made: ActorCritic, *rows: torch.Tensor) -> list[torch.Tensor]:
    """All numbers of a forward, and the gradients of a loss of them in which no two tokens count alike."""
    made.zero_grad()
    out = made(*rows, Want(0.7, entropy="constant", final_value=True))
    weights = torch.arange(out.values.numel()).view_as(out.values)
    (out.logprobs * weights + out.values.square() + out.final_value[:, None]).sum().backward()
    grads = [p.grad.clone() for p in (*made.actor_parameters(), *made.critic_parameters())]
    return [out.logprobs, out.entropy, out.values, out.final_value, *grads]


def assert_close_all(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).detach().abs().max()) <= 1e-5 * max(1.0, float(b.detach().abs().max()))


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_without_a_completion_keeps_its_prompt(packed):
    ids, attended = torch.tensor([[5, 0, 0], [5, 6, 7]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    rows = Layout.of(Rows.of(ids, attended, 2, final=False), packed)
    assert rows.inputs["input_ids"].flatten()[rows.states].tolist() == [[5, 5, 5], [5, 6, 6]]


@pytest.fixture
def packing(monkeypatch):
    """SDPA builds block masks for packed rows: slow, but on a CPU the way to see what flash attention would do."""
    monkeypatch.setattr(packing_module, "PACKING_ATTENTION", "sdpa")
    monkeypatch.setattr(packing_module, "_tried", {})


@pytest.mark.parametrize(
    ("architecture", "critic"), [(tiny_model, "shared"), (tiny_gpt2, "adapter"), (tiny_qwen3, "adapter")]
)
def test_packed_rows_give_what_padded_ones_give(request, architecture, critic):
    made = actor(architecture(), critic=critic).eval()

    padded = outputs(made, IDS, ATTENTION, MASK)
    assert not can_pack(made.causal_lm)
    request.getfixturevalue("packing")
    assert can_pack(made.causal_lm)
    assert_close_all(outputs(made, IDS, ATTENTION, MASK), padded)


@pytest.mark.parametrize("as_reference", [False, True])
def test_a_run_tried_whose_reference_is_an_adapter_on_a_model(request, make_trainer, as_reference):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)

    def ref_logprobs():
        torch.manual_seed(0)
        adapter = get_peft_model(tiny_model(seed=1), config)
        models = {"ref_model": adapter} if as_reference else {"model": adapter, "peft_config": None}
        return make_trainer(**models).rollout(["1=", "请问2+2="]).ref_logprobs

    padded = ref_logprobs()
    request.getfixturevalue("packing")
    assert_close(ref_logprobs(), padded)
    assert {("sdpa", True): True} in packing_module._tried.values()


def test_flash_attention_is_told_where_rows_begin(monkeypatch):
    """Flash attention would otherwise look for it in every layer, and wait for the device each time."""
    told = []

    def attend(module, query, key, value, mask, **kwargs):
        told.append([kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")])
        row = (kwargs["position_ids"][0] == 0).cumsum(dim=0)
        mask = (row[:, None] == row).tril()
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("flash_stand_in", attend)
    AttentionMaskInterface.register("flash_stand_in", lambda *_, **__: None)
    base = tiny_model(seed=1)
    expected = actor(base)(IDS, ATTENTION, MASK)
    base = tiny_model(seed=1)
    base.config._attn_implementation = "flash_stand_in"
    made = actor(base)
    monkeypatch.setattr(packing_module, "find_beginnings", None)  # packed rows share no beginning
    assert can_pack(made.causal_lm)
    made(IDS, ATTENTION, MASK)
    told.clear()
    out = made(IDS, ATTENTION, MASK)
    assert_close(out.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
    assert_close(out.values, expected.values, rtol=1e-4, atol=1e-5)
    assert len(told) == 4  # two layers of each tree
    assert [told[0][0].tolist(), *told[0][2:]] == [[0, 4, 9, 14], 5, 5]
    assert told[0][0].dtype == torch.int32
    assert all(one[0] is told[0][0] for one in told)


def test_an_architecture_that_mixes_packed_rows_is_not_packed(packing):
    """OPT's attention is not told the positions."""
    assert not can_pack(tiny_opt())


# Two rows of one prompt; one that ends alike, but begins otherwise; one without a completion; one with another
# prompt after a common beginning; one that is the first row again.
SHARED_PROMPTS = torch.tensor(
    [[0, 5, 6, 7, 3], [0, 5, 6, 7, 3], [4, 5, 6, 7, 3], [0, 5, 6, 7, 3], [0, 0, 5, 6, 8], [0, 5, 6, 7, 3]]
)
SHARED_COMPLETIONS = torch.tensor([[8, 9, 1], [8, 1, 0], [9, 10, 11], [0, 0, 0], [9, 9, 0], [8, 9, 1]])
SHARED_MASK = SHARED_COMPLETIONS != 0
SHARED_ROWS = (
    torch.cat([SHARED_PROMPTS, SHARED_COMPLETIONS], dim=1),
    torch.cat([SHARED_PROMPTS != 0, SHARED_MASK], dim=1),
    SHARED_MASK,
)


@pytest.fixture
def apart(monkeypatch):
    """No attention is computed by rows of a tree, so that every row is computed by itself."""
    monkeypatch.setattr(packing_module, "SHARING_ATTENTION", "none")
    monkeypatch.setattr(packing_module, "_tried", {})


@pytest.fixture
def short(monkeypatch):
    """Beginnings of one token count."""
    monkeypatch.setattr(packing_module, "SHORTEST", 1)


@pytest.mark.parametrize(
    ("architecture", "critic", "checkpointed"),
    [
        (tiny_model, "adapter", True),
        (tiny_model, "shared", False),
        (tiny_gpt2, "adapter", False),
        (tiny_opt, "adapter", False),
        (tiny_opt, "shared", True),
        (tiny_qwen3, "shared", True),
    ],
)
def test_trees_give_what_rows_of_their_own_give(request, architecture, critic, checkpointed, short):
    made = actor(architecture(), critic=critic)
    if checkpointed:
        made.gradient_checkpointing_enable({"use_reentrant": False})
    shapes = []
    made.causal_lm.get_input_embeddings().register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape))
    context = torch.tensor([True, False, True])  # between two turns
    rows = (*SHARED_ROWS[:2], SHARED_MASK & context)

    shared = outputs(made, *rows)
    assert shapes[-1] == (1, 19)
    request.getfixturevalue("apart")
    shapes.clear()
    assert_close_all(shared, outputs(made, *rows))
    assert set(shapes) == {(6, 8)}


def test_a_critic_whose_attention_is_another_gets_rows_of_its_own(request, short):
    other = tiny_model(seed=3)
    other.config._attn_implementation = "eager"
    made = actor(critic=other.model).eval()
    shared = made(*SHARED_ROWS).values
    assert can_share(made.causal_lm)
    assert not can_share(made.critic.trunk)
    request.getfixturevalue("apart")
    assert_close(shared, made(*SHARED_ROWS).values)


@pytest.mark.parametrize("broken", ["row_tokens", "position_ids"])
def test_an_architecture_that_heeds_no_row_or_position_gets_rows(monkeypatch, broken):
    monkeypatch.setattr(packing_module, "_tried", {})
    model = tiny_model()
    forward = model.model.forward

    def careless(input_ids, position_ids=None, **kwargs):
        given = {"position_ids": position_ids, **kwargs}
        given.pop(broken, None)
        return forward(input_ids, **given)

    assert can_share(model)
    packing_module._tried.clear()
    monkeypatch.setattr(model.model, "forward", careless)
    assert not can_share(model)


OTHER_ATTENTION = {"_attn_implementation": "eager", "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}


@pytest.mark.parametrize(("name", "value"), OTHER_ATTENTION.items())
def test_attention_with_a_window_or_without_sdpa_gets_rows(name, value):
    model = tiny_qwen3()
    setattr(model.config, name, value)
    assert not can_share(model)


@pytest.mark.parametrize("name", ["falcon", "mpt"])
def test_an_architecture_with_an_attention_of_its_own_gets_rows(name):
    model = tiny_of_type(name)
    assert not can_share(model)
    made = actor(model, critic="shared")
    assert made(*SHARED_ROWS).logprobs.shape == (6, 3)


def test_few_tokens_in_common_are_computed_for_each_row():
    model = tiny_model()
    for prompt, rows in ((15, 4), (16, 1)):
        ids = torch.cat([torch.ones(4, prompt, dtype=torch.long), torch.arange(4)[:, None] + 2], dim=1)
        assert lay_out(model, ids, torch.ones_like(ids), 1, final=True).inputs["input_ids"].shape[0] == rows


@pytest.mark.parametrize("entropy", ["none", "constant", "differentiable"])
@pytest.mark.parametrize(("trainable_head", "at_once"), [(False, 1), (True, 3), (True, 8)])
def test_chunked_head_has_the_gradients_of_plain_logits(monkeypatch, entropy, trainable_head, at_once):
    monkeypatch.setattr(output_head, "tokens_at_once", lambda vocab_size, device: at_once)
    targets = [*("q_proj", "down_proj"), *(["lm_head"] if trainable_head else [])]
    made = actor(peft_config=LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"), critic=None)
    hidden = torch.randn(7, 32, requires_grad=True)
    tokens = torch.arange(7) + 2
    weights = torch.randn(2, 7)
    own = [p for name, p in made.named_parameters() if p.requires_grad and "lm_head" in name]
    assert bool(own) == trainable_head

    logprobs, found = output_head.token_logprobs(made.causal_lm, hidden, tokens, 0.7, entropy)
    assert (found is None) == (entropy == "none")
    loss = (weights[0] * logprobs).sum()
    if found is not None:
        loss = loss + (weights[1] * found).sum()
    got = torch.autograd.grad(loss, [hidden, *own])

    plain = torch.log_softmax(made.get_output_embeddings()(hidden) / 0.7, dim=-1)
    expected = plain.gather(1, tokens[:, None]).squeeze(1)
    assert_close(logprobs, expected)
    loss = (weights[0] * expected).sum()
    if found is not None:
        plain_entropy = -(plain.exp() * plain).sum(dim=-1)
        assert_close(found, plain_entropy)
        loss = loss + (weights[1] * plain_entropy).sum() * (entropy == "differentiable")
    for a, b in zip(got, torch.autograd.grad(loss, [hidden, *own]), strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("by", "capped"), [("base", {"logits_scaling": 2.0}), ("autocast", {})])
def test_a_half_precision_head_gives_logits_that_are_not_rounded(monkeypatch, by, capped):
    """With a stand-in for CUDA's product, on logits of the size of a trained model's."""

    def on_cpu(a, b):
        assert a.dtype == b.dtype == torch.bfloat16
        return a.float() @ b.float()

    monkeypatch.setattr(output_head, "product_in_float32", on_cpu)
    made = actor(critic=None)
    made.causal_lm.config.update(capped)
    if by == "base":
        made.causal_lm.lm_head.bfloat16()
    hidden = (5 * torch.randn(40, 32)).bfloat16().requires_grad_()
    tokens, weights = torch.arange(40) % 26, torch.randn(40)

    def outputs(devices: tuple[str, ...]) -> list[torch.Tensor]:
        monkeypatch.setattr(output_head, "FLOAT32_PRODUCTS", devices)
        with torch.autocast("cpu", torch.bfloat16, enabled=by == "autocast"):
            logprobs, _ = output_head.token_logprobs(made.causal_lm, hidden, tokens, 1.0)
        return [logprobs.detach(), *torch.autograd.grad((weights * logprobs).sum(), hidden)]

    weight = made.causal_lm.lm_head.weight.detach().bfloat16().float()
    leaf = hidden.detach().float().requires_grad_()
    logits = leaf @ weight.T / capped.get("logits_scaling", 1.0)
    assert logits.max() > 16 / capped.get("logits_scaling", 1.0)
    expected = logits.log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)
    (wanted,) = torch.autograd.grad((weights * expected).sum(), leaf)
    logprobs, gradient = outputs(("cpu",))
    assert_close(logprobs, expected.detach())
    assert_close(gradient.float(), wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))
    rounded, _ = outputs(())
    assert (rounded - expected).abs().mean() > 0.005


def test_sampling_computes_the_same_logits(monkeypatch):
    monkeypatch.setattr(output_head, "product_in_float32", lambda a, b: a.float() @ b.float())
    monkeypatch.setattr(output_head, "FLOAT32_PRODUCTS", ("cpu",))
    made = actor(tiny_model(seed=1).bfloat16(), critic=None)
    sampler = TransformersSampler(made, Sampling(1.0, 4, [1], 0), batch_size=8)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = padded_turns(sampler([row[row != 0].tolist() for row in PROMPTS], seeds=[1, 2, 3]))
        rows = torch.cat([PROMPTS, found.ids], dim=1), torch.cat([PROMPTS != 0, found.mask], dim=1)
        seen = made.causal_lm(rows[0][:, :4]).logits
        expected = made(*rows, found.mask).logprobs
    assert_close(found.logprobs, expected)
    assert seen.dtype == torch.bfloat16  # outside of sampling


def test_a_head_that_trains_alone_has_a_gradient():
    """Its hidden states have none."""
    made = actor(peft_config=LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM"), critic=None)
    made(IDS, ATTENTION, MASK).logprobs.sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for p in made.actor_parameters())


@pytest.mark.parametrize("lengths", [[9, 9, 8, 3, 2, 1, 1], [5], [4, 4, 4, 4], [100, 1, 1, 1, 1, 1]])
def test_the_largest_micro_batch_is_as_small_as_can_be(lengths):
    for num in range(1, len(lengths) + 1):
        sizes = balanced_sizes(lengths, [0] * len(lengths), num)
        assert len(sizes) == num
        assert sum(sizes) == len(lengths)
        assert min(sizes) >= 1

        def padded(cuts):
            return max((b - a) * lengths[a] for a, b in itertools.pairwise((0, *cuts, len(lengths))))

        best = min(padded(cuts) for cuts in itertools.combinations(range(1, len(lengths)), num - 1))
        assert padded(list(itertools.accumulate(sizes))[:-1]) == best


def test_no_micro_batch_of_several_rows_exceeds_its_tokens():
    lengths = [30, 12, 10, 10, 3, 2]
    for max_tokens, sizes in ((20, [1, 1, 2, 2]), (1, [1] * 6), (1000, [6])):
        assert sizes_within(lengths, [0] * 6, max_tokens) == sizes


def test_tokens_that_rows_share_count_once_in_a_micro_batch():
    lengths, shared = [10, 12, 11, 9, 5, 30, 30], [0, 8, 8, 8, 0, 0, 29]
    assert sizes_within(lengths, shared, 16) == [2, 2, 1, 1, 1]
    assert sizes_within(lengths, shared, 18) == [4, 1, 1, 1]
    assert sizes_within(lengths, shared, 31) == [5, 2]
    assert balanced_sizes(lengths, shared, 2) == [5, 2]


def test_a_token_budget_changes_no_run(make_trainer):
    """Here down to a piece for each row, which is the most that another process can need."""
    config = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    config |= {"max_steps": 4, "include_num_input_tokens_seen": "non_padding"}
    whole = make_trainer(config, model=tiny_model(seed=1), callbacks=[stops_at_kl(1e-4)])
    whole.train()
    config |= {"max_tokens_per_micro_batch": 1}
    cut = make_trainer(config, model=tiny_model(seed=1), callbacks=[stops_at_kl(1e-4)])
    pieces = []
    step = cut.training_step
    cut.training_step = lambda model, inputs, *args: pieces.append(len(inputs["pieces"])) or step(model, inputs, *args)
    cut.train()
    assert min(pieces) * 2 >= 16
    assert cut.state.num_input_tokens_seen == whole.state.num_input_tokens_seen > 0
    assert cut.ppo_state.rollouts == whole.ppo_state.rollouts > 1, "the callback saw another KL"
    assert_close(trainable(cut), trainable(whole), rtol=1e-3, atol=1e-6)
    for name in ("loss", "policy/approx_kl", "value/loss", "policy/ratio"):
        assert logged(cut, name) == pytest.approx(logged(whole, name), rel=1e-4, abs=1e-6)


# Autocast


def inputs_of_lora(model) -> list[torch.dtype]:
    """Return the dtypes of what LoRA's first factors read, which go on being noted."""
    seen: list[torch.dtype] = []
    for name, module in model.named_modules():
        if ".lora_A." in name:
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    return seen


@pytest.mark.parametrize("checkpointed", [False, True])
def test_autocast_alone_casts_the_inputs_of_lora(monkeypatch, checkpointed):
    """To the bit as with PEFT's cast to float32 and back, in both trees, and where a layer is computed again."""
    rows = torch.arange(2, 14).view(2, 6), torch.ones(2, 6).long(), torch.ones(2, 3).bool()

    def outputs() -> tuple[list[torch.Tensor], set[torch.dtype]]:
        torch.manual_seed(0)
        model = ActorCritic(tiny_model().bfloat16(), lora()).train()
        for parameter in (*model.actor_parameters(), *model.critic_parameters()):
            torch.nn.init.normal_(parameter, std=0.1)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        seen = inputs_of_lora(model)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(*rows)
            written = model.generate(rows[0], max_new_tokens=4, do_sample=False)
        (out.logprobs.sum() + out.values.square().sum()).backward()
        trained = (*model.actor_parameters(), *model.critic_parameters())
        with_autocast = set(seen)
        seen.clear()
        model(*rows)  # as a base in bfloat16 needs it
        assert set(seen) == {torch.float32}
        return [out.logprobs, out.values, written, *(p.grad for p in trained)], with_autocast

    found, dtypes = outputs()
    monkeypatch.setattr(actor_critic, "follow_autocast", lambda *_: None)
    expected, before = outputs()
    assert (dtypes, before) == ({torch.bfloat16}, {torch.float32})
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(x.abs().max() > 0 for x in found)


def test_a_variant_of_lora_keeps_pefts_cast():
    """DoRA computes the norm of its weights in the dtype of its input."""
    model = ActorCritic(tiny_model().bfloat16(), lora(use_dora=True))
    seen = inputs_of_lora(model.base_model)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.arange(2, 8)[None])
    assert set(seen) == {torch.float32}
