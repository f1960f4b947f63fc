"""Reward models score the same text as plain transformers does."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModelForSequenceClassification
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from helpers.runs import count_digits
from helpers.scripted import answering
from helpers.tiny import LORA, other_tokenizer, scorer, tiny_model
from hfppo import TolerantReward
from hfppo.data.prompts import Prompts
from hfppo.rewards.load_rewards import load_reward_func, load_reward_funcs
from hfppo.rewards.model import RewardAdapter, RewardModel, check_conversations, conversation
from hfppo.rewards.reward_func import continue_text

TEXTS = ["1+2=3", "10+20=", "5", "请问12+7=20？不对，等于19！"]


def alone(model, tokenizer, text: str) -> float:
    """The score by the definition: one text, no padding, logits at its last token."""
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state[0, -1]
        return float(model.score(hidden)[0])


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("pad_token", ["<void>", "<end>"])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_score_is_that_of_the_text_alone(padding_side, pad_token, batch_size):
    model, tokenizer = scorer().eval(), other_tokenizer(padding_side, pad_token)
    reward = RewardModel(model, tokenizer, batch_size)
    expected = [alone(model, tokenizer, text) for text in TEXTS]
    assert len({round(x, 3) for x in expected}) == len(TEXTS)
    assert_close(torch.tensor(reward.score(TEXTS)), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_trainer_gives_it_prompt_completion_and_eos(make_trainer, tmp_path):
    model, tokenizer = scorer(), other_tokenizer("left", "<void>")
    model.save_pretrained(tmp_path / "scorer")
    tokenizer.save_pretrained(tmp_path / "scorer")
    path = str(tmp_path / "scorer")
    for reward in (path, RewardModel(model, tokenizer)):
        trainer = make_trainer({"kl_coef": 0.0}, reward_funcs=[reward])
        rollout = trainer.rollout(["1+2=", "请问5+6="])
        texts = [
            trainer.processing_class.decode(torch.cat([p[pm], c[cm]]), skip_special_tokens=True)
            for p, pm, c, cm in zip(
                rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.mask, strict=True
            )
        ]
        expected = [alone(model.eval(), tokenizer, text + "<end>") for text in texts]
        assert_close(rollout.scores, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrapped", [lambda model: model, TolerantReward], ids=["plain", "tolerant"])
@pytest.mark.parametrize("kind", [RewardModel, RewardAdapter])
def test_conversations_that_it_cannot_render_are_refused(kind, wrapped):
    tokenizer = other_tokenizer("right", "<void>")
    texts, conversations = (Prompts(Dataset.from_dict({}), [], conversational) for conversational in (False, True))

    def check(prompts: Prompts) -> None:
        func = RewardModel(scorer(), tokenizer) if kind is RewardModel else RewardAdapter("path", tokenizer)
        check_conversations("judge", wrapped(func), "train_dataset", prompts)

    check(conversations)
    tokenizer.chat_template = None
    check(texts)
    check_conversations("count_digits", count_digits, "train_dataset", conversations)
    message = "'judge': the prompts of train_dataset are conversations, but its own tokenizer has no chat_template"
    with pytest.raises(ValueError, match=message):
        check(conversations)


def test_a_conversation_is_rendered_as_the_policys_prompt_is():
    """Without the None keys that Arrow fills in, and with what the row says about its rendering."""
    model, tokenizer = scorer().eval(), other_tokenizer("right", "<void>")
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | length }}{% endif %}{{ mark }}"
        "{% for m in messages %}{% if 'tool_calls' in m %}不{% endif %}{{ m['content'] }}{% endfor %}"
    )
    prompts = [[{"role": "user", "content": "1+2=", "tool_calls": None}]] * 2
    answers = [[{"role": "assistant", "content": "3"}]] * 2
    columns = {"tools": [[{"name": "add"}, {"name": "sum"}], None], "chat_template_kwargs": [None, {"mark": "请"}]}
    expected = [alone(model, tokenizer, text) for text in ("21+2=3", "请1+2=3")]
    assert RewardModel(model, tokenizer)(prompts, answers, **columns) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("special", "of_text", "of_talk"),
    [
        (None, "1+2=3<end>", "1+2=？3"),
        # A tokenizer may add EOS, as those of RoBERTa, DeBERTa and ALBERT do. OPT's BOS is its EOS.
        ("<end> $A <end>", "<end>1+2=3<end>", "1+2=？3"),
        ("<end> $A", "<end>1+2=3<end>", "1+2=？3"),
        # A chat template has written the special tokens; a second BOS would be another text.
        ("<void> $A", "<void>1+2=3<end>", "1+2=？3"),
    ],
)
def test_special_tokens_are_added_once_to_texts_and_not_to_conversations(special, of_text, of_talk):
    model, tokenizer, bare = scorer().eval(), *(other_tokenizer("right", "<void>") for _ in range(2))
    if special is not None:
        around = {"single": special, "special_tokens": [("<end>", 0), ("<void>", 1)]}
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**around)
    reward = RewardModel(model, tokenizer)
    assert reward(["1+2="], ["3"]) == pytest.approx([alone(model, bare, of_text)], abs=1e-5)
    prompt, answer = [{"role": "user", "content": "1+2="}], [{"role": "assistant", "content": "3"}]
    assert reward([prompt], [answer]) == pytest.approx([alone(model, bare, of_talk)], abs=1e-5)


def test_a_turn_that_the_prompt_has_begun_stays_one():
    model, tokenizer = scorer().eval(), other_tokenizer("right", "<void>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}！{% endfor %}"
    prompt = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "不"}]
    answer = [{"role": "assistant", "content": "3"}]
    expected = alone(model, tokenizer, "1+2=！不3！")
    assert RewardModel(model, tokenizer)([prompt], [answer]) == pytest.approx([expected], abs=1e-5)
    assert prompt[-1]["content"] == "不"
    parts = [{"type": "text", "text": "不"}]
    begun = [{"role": "assistant", "content": parts}]
    assert conversation(begun, answer) == [{"role": "assistant", "content": [*parts, {"type": "text", "text": "3"}]}]


def test_a_reward_model_that_is_the_critic_as_well_keeps_its_scores(make_trainer):
    model, tokenizer = scorer(), other_tokenizer("right", "<void>")
    reward = RewardModel(model, tokenizer)
    before = reward.score(TEXTS)
    trainer = make_trainer({"max_steps": 4}, reward_funcs=reward, critic=model)
    weight = trainer.model.critic.trunk.base_model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert weight.data_ptr() == model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    trainer.train()
    assert reward.score(TEXTS) == before
    assert moves_with_what_it_shares(reward)


def test_a_loaded_reward_model_may_have_an_adapter(make_trainer):
    config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False)
    trained, tokenizer = PeftModelForSequenceClassification(scorer(), config), other_tokenizer("right", "<void>")
    for given in (tokenizer, [tokenizer]):  # a single one is taken as in TRL
        trainer = make_trainer(reward_funcs=trained, reward_processing_classes=given)
        assert trainer.collector.rewards.funcs[0].score(TEXTS) == RewardModel(trained, tokenizer).score(TEXTS)


def moves_with_what_it_shares(reward: RewardModel) -> bool:
    """Whether all of it goes where Trainer has moved the tensors of actor or critic."""
    reward.model.get_input_embeddings().to("meta")
    with pytest.raises(RuntimeError):  # for there is nothing to compute with
        reward.score(TEXTS)
    return {x.device.type for x in (*reward.model.parameters(), *reward.model.buffers())} == {"meta"}


@pytest.mark.parametrize(
    ("given", "at", "trainers", "expected"),
    [
        ("loaded", "cpu", "meta", "meta"),
        ("loaded", "meta", "cpu", "meta"),  # only a model on the CPU is moved
        ("by id", "cpu", "meta", "meta"),
        ("as a function", "cpu", "meta", "cpu"),
    ],
)
def test_a_reward_model_goes_to_the_trainers_device(tmp_path, given, at, trainers, expected):
    model, tokenizer = scorer().to(at), other_tokenizer("right", "<void>")
    if given == "by id":
        model.save_pretrained(tmp_path)
    funcs = {"loaded": model, "by id": str(tmp_path), "as a function": RewardModel(model, tokenizer)}
    own = None if given == "as a function" else [tokenizer]
    (reward,) = load_reward_funcs(funcs[given], own, "base", torch.device(trainers))
    reward.score([])
    assert {x.device.type for x in (*reward.model.parameters(), *reward.model.buffers())} == {expected}


def test_adapter_on_the_actors_base_scores_like_the_merged_model_and_costs_itself(
    make_trainer, tmp_path, base_path, tokenizer, caplog
):
    config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False)
    classifier = AutoModelForSequenceClassification.from_pretrained(base_path, num_labels=1)
    trained = PeftModelForSequenceClassification(classifier, config)
    torch.nn.init.normal_(trained.get_base_model().score.modules_to_save["default"].weight)
    trained.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    merged = RewardModel(trained.merge_and_unload(), tokenizer)

    caplog.clear()
    trainer = make_trainer({"max_steps": 4}, model=base_path, reward_funcs=str(tmp_path / "adapter"), peft_config=LORA)
    assert "num_labels" not in caplog.text
    reward = trainer.collector.rewards.funcs[0]
    assert isinstance(reward, RewardAdapter)
    assert_close(torch.tensor(reward.score(TEXTS)), torch.tensor(merged.score(TEXTS)), rtol=1e-4, atol=1e-5)
    of_actor = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    extra = [p for p in reward.model.parameters() if p.untyped_storage().data_ptr() not in of_actor]
    adapter = sum(p.numel() for name, p in reward.model.named_parameters() if "lora_" in name)
    assert sum(p.numel() for p in extra) <= adapter + 3 * 32, "adapter and head alone"

    before = reward.score(TEXTS)
    trainer.train()
    assert reward.score(TEXTS) == before, "training the actor must not change the reward"

    tolerant = TolerantReward(str(tmp_path / "adapter"))
    (wrapper,) = make_trainer(model=base_path, reward_funcs=tolerant, peft_config=LORA).collector.rewards.funcs
    assert wrapper.func.score(TEXTS) == before

    assert moves_with_what_it_shares(reward)


def test_bad_reward_models(make_trainer, tmp_path, tokenizer):
    labels = {"id2label": {0: "NO", 1: "YES"}, "label2id": {"NO": 0, "YES": 1}}
    with pytest.raises(ValueError, match=r"2 labels \(NO, YES\).*label="):
        RewardModel(scorer(2, **labels), tokenizer)
    assert RewardModel(scorer(2, **labels), tokenizer, label="YES").label == 1
    tiny_model().save_pretrained(tmp_path / "causal")
    tokenizer.save_pretrained(tmp_path / "causal")
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "causal", num_labels=1)
    PeftModelForSequenceClassification(other, config).save_pretrained(tmp_path / "foreign")
    for given, message in (
        ({"reward_funcs": "nowhere"}, r"reward_funcs='nowhere' cannot be loaded"),
        ({"reward_funcs": str(tmp_path / "causal")}, r"no weights for score.weight: it is not a reward model"),
        ({"reward_funcs": str(tmp_path / "foreign")}, r"foreign' was trained on .*causal.*merge the adapter"),
        ({"reward_processing_classes": [None, None]}, r"reward_processing_classes has 2 entries for 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(**given)


@pytest.mark.parametrize("given", ["id", "loaded", "tolerant"])
def test_where_its_tokenizer_can_be_given_is_said(make_trainer, tmp_path, monkeypatch, tokenizer, given):
    monkeypatch.chdir(tmp_path)
    scorer().save_pretrained("org/reward")
    loaded = AutoModelForSequenceClassification.from_pretrained("org/reward")
    func = {"id": "org/reward", "loaded": loaded, "tolerant": TolerantReward("org/reward")}[given]
    with pytest.raises(
        ValueError, match=r"of reward_funcs='org/reward' cannot be loaded; .*reward_processing_classes"
    ):
        make_trainer(reward_funcs=func)
    make_trainer(reward_funcs=func, reward_processing_classes=tokenizer)
    with pytest.raises(ValueError, match="or give it in reward_processing_classes"):
        make_trainer(reward_funcs=scorer())


def test_an_adapter_without_a_tokenizer_reads_its_bases(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "base")
    config = LoraConfig(task_type="SEQ_CLS", base_model_name_or_path=str(tmp_path / "base"))
    config.save_pretrained(tmp_path / "adapter")
    func = load_reward_func(str(tmp_path / "adapter"), None, str(tmp_path / "base"), torch.device("cpu"))
    assert func.tokenizer.get_vocab() == tokenizer.get_vocab()


def test_of_a_text_longer_than_its_positions_the_end_is_read():
    tokenizer = other_tokenizer("right", "<pad>")
    model = RewardModel(scorer(max_position_embeddings=8), tokenizer)
    text = "1+2=3" * 5
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > 8
    expected = float(model.outputs([ids[-8:]])[0][0])
    assert model.score([text]) == [pytest.approx(expected, abs=1e-6)]
    assert tokenizer.truncation_side == "right"


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Words as Llama 2 writes them: a space before each, of which decoding drops the first."""
    words = ["<pad>", "<end>", "<user>", *(f"▁{word}" for word in ("the", "capital", "of", "is", "?")), "s"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", extra_special_tokens=["<user>"]
    )
    wrapped.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user>{% endif %}{{ m.content }}{% endfor %}"
    )
    return wrapped


TALK = [{"role": "user", "content": "the capital of"}]
BEGUN = [*TALK, {"role": "assistant", "content": "capital of"}]


@pytest.mark.parametrize("wrapped", [lambda model: model, TolerantReward], ids=["plain", "tolerant"])
@pytest.mark.parametrize(
    ("prompt", "written", "given", "read"),
    [
        ("the capital of", [4, 5, 1], "capital of", "the capital of capital of<end>"),
        ("the capital of", [8, 4, 1], "s capital", "the capital ofs capital<end>"),
        ("the capital of", [1], "", "the capital of<end>"),
        (TALK, [4, 5, 1], "capital of", "the capital of|capital of"),
        (BEGUN, [4, 5, 1], "capital of", "the capital of|capital of capital of"),
    ],
    ids=["a word", "the end of a word", "nothing", "a message", "a message that goes on"],
)
def test_it_reads_prompt_and_completion_as_the_policy_wrote_them(make_trainer, prompt, written, given, read, wrapped):
    texts, seen = [], []

    class Reader(RewardModel):
        def score(self, read, add_special_tokens=True):
            texts.extend(read)
            return [0.0] * len(read)

    def function(completions, **kwargs):
        seen.extend(completions)
        return [0.0] * len(completions)

    tokenizer = words_tokenizer()
    own = other_tokenizer("left", "<void>")
    own.chat_template = "{{ messages | map(attribute='content') | join('|') }}"
    dataset = Dataset.from_dict({"prompt": [prompt] * 4})
    funcs = [wrapped(Reader(scorer(), own)), function]
    trainer = make_trainer(processing_class=tokenizer, reward_funcs=funcs, train_dataset=dataset)
    answering(trainer, written).rollout([prompt])
    assert texts == [read]
    assert seen == [given if isinstance(prompt, str) else [{"role": "assistant", "content": given}]]  # as in TRL


def test_where_decoding_changes_the_prompt_the_completion_is_decoded_alone(monkeypatch):
    tokenizer = words_tokenizer()
    assert continue_text("is", [3, 4], [6], tokenizer) == " is"
    whole = {(3, 4): "the capital", (6,): "is", (3, 4, 6): "the Capital is"}
    monkeypatch.setattr(tokenizer, "batch_decode", lambda rows, **_: [whole[tuple(row)] for row in rows])
    assert continue_text("is", [3, 4], [6], tokenizer) == "is"
