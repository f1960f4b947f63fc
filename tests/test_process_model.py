"""Process reward models: each step's number is on the token that ends it, as by the model's definition on one text."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModelForTokenClassification
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForTokenClassification, PreTrainedTokenizerFast, set_seed

from helpers.agents import Doors
from helpers.scripted import answering, finished, ids_of
from helpers.tiny import other_tokenizer, tiny_model
from hfppo import ProcessRewardModel, RewardModel, TokenTable, TolerantReward
from hfppo.rewards.reward_func import Log, RewardBatch

COMMA = {"step_separator": "，"}
WRITTEN = "1+1，2，等于3"  # three steps


def judge(num_labels: int = 2, **config) -> LlamaForTokenClassification:
    base = {name: x for name, x in tiny_model().config.to_dict().items() if name not in ("id2label", "label2id")}
    set_seed(6)
    made = LlamaForTokenClassification(LlamaConfig(**{**base, "num_labels": num_labels, **config}))
    torch.nn.init.normal_(made.score.weight, std=0.2)
    return made.eval()


@torch.no_grad()
def right(model, text: str, tokenizer=None) -> float:
    """By the definition: the probability of label 1 at the last token of one text."""
    ids = (tokenizer or other_tokenizer("right", "<void>"))(text, add_special_tokens=False)["input_ids"]
    return float(model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(dim=0)[1])


def after_steps(model, prompt: str) -> list[float]:
    """By the definition: what the model says of the three steps of `WRITTEN`, each read with its separator."""
    return [right(model, prompt + read) for read in ("1+1，", "1+1，2，", "1+1，2，等于3，")]


def policy_of(*tokens: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are texts of any length; 0 is padding, 1 EOS."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", *tokens])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def rewards_of(reward, policy, ids: list[int], prompt="", before: tuple[int, ...] = (), **columns):
    """The rewards of one completion's tokens."""
    sample = finished(prompt, "", ids, before, **{name: values[0] for name, values in columns.items()})
    (found,) = reward.score_batch(RewardBatch([sample], policy), Log())
    return found


def comma_model(model, **options) -> ProcessRewardModel:
    """A process reward model whose steps end with a comma."""
    return ProcessRewardModel(model, other_tokenizer("right", "<void>"), **COMMA, **options)


def at(positions: tuple[int, ...], rewards: list[float], length: int):
    """Rewards by position, and 0 elsewhere."""
    by_position = dict(zip(positions, rewards, strict=True))
    return pytest.approx([by_position.get(position, 0.0) for position in range(length)], abs=1e-5)


def test_steps_are_rewarded_where_they_end_in_a_rollout_and_in_the_token_table(make_trainer):
    model, prompts = judge(), Dataset.from_dict({"prompt": ["请问1+1="] * 4})
    reward = comma_model(model)
    for given in (reward, TolerantReward(reward)):
        config = {"kl_coef": 0.0, "reward_weights": [2.0], "max_completion_length": 16}
        trainer = make_trainer(config, reward_funcs=given, train_dataset=prompts)
        rollout = answering(trainer, WRITTEN + ".").rollout(["请问1+1="])
        steps = [2 * number for number in after_steps(model, "请问1+1=")]
        assert len({0, *(round(x, 3) for x in steps)}) == 4
        assert rollout.rewards[0].tolist() == at((3, 5, 8), steps, 10)
        table = TokenTable.from_rollout(rollout, 0, trainer.processing_class)
        assert [row.reward for row in table.rows] == at((3, 5, 8), steps, 10)
        assert table.score == pytest.approx(sum(steps), abs=1e-5)


def test_each_token_is_rewarded_without_a_separator(tokenizer):
    """The same tokens: as they were sampled, EOS included."""
    model = judge()
    reward = ProcessRewardModel(model, tokenizer, step_separator=None)
    ids = ids_of("12，.")
    texts = ["1+1=1", "1+1=12", "1+1=12，", f"1+1=12，{tokenizer.eos_token}"]
    expected = [right(model, text, tokenizer) for text in texts]
    assert rewards_of(reward, tokenizer, ids, "1+1=", tuple(ids_of("1+1="))) == pytest.approx(expected, abs=1e-5)


def test_with_another_tokenizer_a_reward_goes_to_the_token_that_writes_its_last_character():
    policy, model = policy_of("1+", "1，2", "，等", "于3", "问"), judge()
    ids = [2, 3, 4, 5, 1]
    steps = ProcessRewardModel(model, other_tokenizer("right", "<void>"), **COMMA)
    first, second, third = after_steps(model, "问")
    found = rewards_of(steps, policy, ids, "问", (6,))
    assert found == pytest.approx([0, first, second, third, 0], abs=1e-5)

    tokens = ProcessRewardModel(model, other_tokenizer("right", "<void>"), step_separator=None)
    each = [right(model, "问" + WRITTEN[: n + 1]) for n in range(len(WRITTEN))]
    expected = [sum(each[:2]), sum(each[2:5]), sum(each[5:7]), sum(each[7:]), 0]
    assert rewards_of(tokens, policy, ids, "问", (6,)) == pytest.approx(expected, abs=1e-5)


def test_bytes_that_are_no_characters_end_no_run():
    """In Llama 2's tokens a later byte turns the bytes "ab" before it into signs for broken text."""
    vocabulary = {**{f"<0x{byte:02X}>": byte for byte in range(256)}, "▁": 256, "1，": 257}
    made = Tokenizer(models.BPE(vocabulary, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    policy = PreTrainedTokenizerFast(tokenizer_object=made)
    broken = [257, ord("a"), ord("b"), 0xD6, 257, 0xEF, 0xBC, 0x8C]  # the last three are a comma
    assert policy.decode(broken) == "1，\ufffd\ufffd\ufffd1，，"
    found = rewards_of(comma_model(judge()), policy, broken)
    assert [x > 0 for x in found] == [True, False, False, False, True, False, False, False]


def test_a_conversation_is_rendered_by_its_own_chat_template(tokenizer):
    """The template writes tokens before the completion, and the tokens of the completion stay where they are."""
    model, own = judge(), other_tokenizer("right", "<void>")
    reward = ProcessRewardModel(model, own, **COMMA)
    own.chat_template += "{{ mark }}"
    reward.tokenizer = own
    user, begun = {"role": "user", "content": "1=", "tool_calls": None}, {"role": "assistant", "content": "是"}
    kwargs = {"chat_template_kwargs": [{"mark": "不"}]}
    for prompt, columns, text in (([user], {}, "1=？，"), ([user], kwargs, "1=？，不"), ([user, begun], {}, "1=？是")):
        found = rewards_of(reward, tokenizer, ids_of(WRITTEN + "."), prompt, **columns)
        assert found == at((3, 5, 8), after_steps(model, text), 10)


def test_what_is_read_of_a_step(tokenizer):
    """BOS before a text as for PRMTrainer; the step token in place of the separator; nothing of an empty step."""
    model, own = judge(), other_tokenizer("right", "<void>")
    own.bos_token = "<void>"
    reward = ProcessRewardModel(model, own, **COMMA, step_token="！", label=1)
    found = rewards_of(reward, tokenizer, ids_of("，1，，2，."), "3=")
    expected = [0, 0, right(model, "<void>3=1！"), 0, 0, right(model, "<void>3=1！2！"), 0]
    assert found == pytest.approx(expected, abs=1e-5)
    assert rewards_of(reward, tokenizer, ids_of("."), "3=") == [0.0]


def test_a_single_label_is_the_reward_itself(tokenizer):
    model, ids = judge(1), other_tokenizer("right", "<void>")("1，")["input_ids"]
    with torch.no_grad():
        expected = float(model(input_ids=torch.tensor([ids])).logits[0, -1, 0])
    assert rewards_of(comma_model(model), tokenizer, ids_of("1.")) == pytest.approx([expected, 0], abs=1e-5)


def test_a_long_prompt_loses_its_beginning_and_a_long_completion_has_no_score(tokenizer):
    model = judge(max_position_embeddings=6)
    reward = comma_model(model)
    assert rewards_of(reward, tokenizer, ids_of("8"), "1234567") == pytest.approx([right(model, "45678，")], abs=1e-5)
    assert right(model, "5678，") != right(model, "45678，")
    assert rewards_of(reward, tokenizer, ids_of("123456"), "1") is None


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_rows_of_several_lengths_are_judged_as_alone(tokenizer, batch_size):
    model = judge()
    reward = ProcessRewardModel(model, other_tokenizer("left", "<end>"), batch_size, **COMMA)
    texts = ["1+1，2", "", "3", "等于3，4，5"]
    ids = [ids_of(text + ".") for text in texts]
    samples = [finished("", text, own) for text, own in zip(texts, ids, strict=True)]
    for of_row, own in zip(reward.score_batch(RewardBatch(samples, tokenizer), Log()), ids, strict=True):
        assert of_row == pytest.approx(rewards_of(reward, tokenizer, own), abs=1e-5)


def test_it_is_given_by_id_or_loaded(make_trainer, tmp_path):
    model, own = judge(), other_tokenizer("right", "<void>")
    model.save_pretrained(tmp_path / "judge")
    own.save_pretrained(tmp_path / "judge")
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="TOKEN_CLS")
    adapted = PeftModelForTokenClassification(judge(), config)
    policy, found = policy_of("1+1", "\n", "2"), []
    for given in (str(tmp_path / "judge"), model, adapted):
        trainer = make_trainer(reward_funcs=given, reward_processing_classes=None if isinstance(given, str) else own)
        (reward,) = trainer.collector.rewards.funcs
        assert type(reward) is ProcessRewardModel
        assert (reward.step_separator, reward.label) == ("\n", 1)
        assert reward.device == torch.device("cpu") or isinstance(given, str)
        found.append(rewards_of(reward, policy, [2, 3, 4, 1]))
    assert found[0] == found[1] == found[2]
    assert [x > 0 for x in found[0]] == [False, True, True, False]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (2, {"step_token": "<extra_0>"}, r"step_token='<extra_0>' is not a token of"),
        (2, {"step_separator": ""}, r"step_separator=.* pass the text that ends a step"),
        (2, {"step_separator": None, "step_token": "！"}, r"step_separator=.* pass the text that ends a step"),
        (3, {}, r"3 labels .*label="),
    ],
)
def test_options_that_do_not_fit_are_refused(labels, options, message):
    with pytest.raises(ValueError, match=message):
        ProcessRewardModel(judge(labels), other_tokenizer("right", "<void>"), **options)


def test_what_cannot_be_judged_is_refused_before_sampling(make_trainer, make_agent, tmp_path, base_path):
    reward = ProcessRewardModel(judge(), other_tokenizer("right", "<void>"))
    with pytest.raises(ValueError, match="rewards the steps of one turn, but completions with tools or an env"):
        make_agent(environment_factory=Doors, reward_funcs=reward)
    with pytest.raises(ValueError, match="processing_class, a object, does not have it"):
        reward.check(object(), several_turns=False)
    base = LlamaForTokenClassification.from_pretrained(base_path, num_labels=2)
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="TOKEN_CLS")
    PeftModelForTokenClassification(base, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="adapter' rewards tokens, which needs a model of its own; merge the adapter"):
        make_trainer(reward_funcs=str(tmp_path / "adapter"))
    assert issubclass(ProcessRewardModel, RewardModel)
