"""The same scripted model, tools and environments here and in TRL's GRPOTrainer: equal token ids and masks."""

import copy
from operator import itemgetter

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from helpers import agents
from helpers.agents import Script, agent_trainer, call, calling_tokenizer, collect, count_messages
from helpers.tiny import LORA, tiny_model

# TRL's configuration still passes transformers' old name on.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

ROWS = agents.PROMPTS.to_list()


class EchoEnvironment:
    """After TRL's documentation: an environment whose tool repeats a message, scored by `get_reward`."""

    def reset(self, **kwargs) -> None:
        self.reward = 0.0

    def echo(self, message: str) -> str:
        """
        Echo the message back.

        Args:
            message: the message
        """
        self.reward += len(message)
        return message

    def get_reward(self) -> float:
        return self.reward


class CounterEnvironment:
    """After TRL's documentation: a counter with two tools, one of which raises."""

    def reset(self, start: int = 0, **kwargs) -> str:
        self.count = start
        return f"count {start}"

    def increment(self, by: int) -> str:
        """
        Add to the counter.

        Args:
            by: how much
        """
        self.count += by
        return f"{self.count}"

    def decrement(self) -> int:
        """Take one away."""
        if self.count == 0:
            raise ValueError("it is 0")
        self.count -= 1
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: one
        b: another
    """
    return a * b


CASES = {
    "an environment with a score": (
        {"environment_factory": EchoEnvironment},
        [
            [call("echo", message="ab"), call("echo", message="c"), "ok"],
            ["a"],
            [call("echo", message="a b"), "b"],
            [""],
        ],
    ),
    "tools that raise and unknown tools": (
        {"environment_factory": CounterEnvironment},
        [
            [call("decrement"), call("increment", by=2), "a"],
            [call("increment", by=1) + call("decrement"), "a"],
            [call("missing", x=1), "a"],
            [f"abc{call('decrement')}", call("increment", by="x"), "a"],
        ],
    ),
    "tools without an environment": (
        {"tools": [multiply], "reward_funcs": count_messages},
        [[call("multiply", a=3, b=4), "12"], ["a"], [call("multiply", a=3), "a"], ["<call>multiply(a=3", "a"]],
    ),
    "a limit of rounds": (
        {"tools": [multiply], "reward_funcs": count_messages, "rounds": 1},
        [[call("multiply", a=3, b=4)] * 2, ["a"], [call("multiply", a=1, b=1), "a"], ["b"]],
    ),
    "an answer that does not fit": (
        {"environment_factory": EchoEnvironment, "most": 39},
        [[call("echo", message="abcdefghij"), "a"], ["a"], [call("echo", message="a"), "b" * 30], ["b"]],
    ),
}


def by_trl(out, scripts, rounds=None, most=100, rows=ROWS, **kwargs):
    tokenizer = calling_tokenizer()
    script = Script(tokenizer, *scripts)

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            return [turn.ids for turn in script(prompt_ids, None, [most] * len(prompt_ids))], None

    args = GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=4, num_generations=2, max_completion_length=most,
        max_tool_calling_iterations=rounds, use_cpu=True, bf16=False, report_to="none",
    )  # fmt: skip
    trainer = Scripted(
        model=tiny_model(vocab_size=agents.VOCAB_SIZE, max_position_embeddings=256),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=copy.deepcopy(LORA),  # PEFT resolves its target modules in place
        **{"reward_funcs": [], **kwargs},
    )
    trainer.model.train()
    found = trainer._generate_and_score_completions([dict(row) for row in rows])
    real = found["completion_mask"].bool()
    sampled = found.get("tool_mask", real).bool()
    rows = zip(found["completion_ids"], real, sampled, strict=True)
    return [(ids[r].tolist(), s[r].tolist()) for ids, r, s in rows]


def here(out, scripts, rounds=None, most=100, rows=ROWS, **kwargs):
    config = {"max_completion_length": most, "max_tool_calling_iterations": rounds}
    rollout, *_ = collect(agent_trainer(out, *scripts, config=config, dataset=Dataset.from_list(rows), **kwargs))
    each = zip(rollout.completion_ids, rollout.real, rollout.mask, strict=True)
    return [(ids[real].tolist(), mask[real].tolist()) for ids, real, mask in each]


@pytest.mark.parametrize("case", CASES)
def test_token_ids_and_masks_are_those_of_grpo_trainer(tmp_path, case):
    options, scripts = CASES[case]
    expected, found = by_trl(tmp_path / "trl", scripts, **options), here(tmp_path / "here", scripts, **options)
    decode = calling_tokenizer().decode
    assert [decode(ids) for ids, _ in found] == [decode(ids) for ids, _ in expected]
    assert found == expected


class Seen:
    """A reward function that keeps what it is called with."""

    __name__ = "seen"

    def __call__(self, prompts, completions, **_):
        self.prompts, self.completions = prompts, completions
        return [0.0] * len(prompts)


THINKING = {
    **agents.RESPONSE,
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text", "optional": True},
        **agents.RESPONSE["fields"],
    },
}


@pytest.mark.parametrize("response", [None, agents.RESPONSE, THINKING], ids=["no template", "calls", "thinking"])
def test_completions_of_conversations_are_parsed_as_by_grpo_trainer(tmp_path, response, monkeypatch):
    monkeypatch.setattr("helpers.agents.RESPONSE", response)
    scripts = [
        ["<think>ab</think>12"],
        [f"so {call('add', a=1, b=2)}"],
        ["<think>without an end…"],
        [f"{call('add')[:-9]}"],  # a call that is cut
    ]
    seen = [Seen(), Seen()]
    expected = by_trl(tmp_path / "trl", scripts, reward_funcs=[seen[0]])
    assert here(tmp_path / "here", scripts, reward_funcs=[seen[1]]) == expected
    assert seen[1].completions == seen[0].completions
    assert seen[1].prompts == seen[0].prompts
    if response is THINKING:
        first = {"role": "assistant", "content": "12", "reasoning_content": "ab"}
        assert seen[1].completions[0] == [first]
    assert ("tool_calls" in seen[1].completions[1][0]) == (response is not None)


def test_a_dataset_without_prompts_keeps_the_placeholder_out_of_reset_as_grpo_trainer_does(tmp_path):
    rows, given = [{"start": n} for n in range(4)], []

    class Keeping(CounterEnvironment):
        def reset(self, **row) -> str:
            given.append(row)
            return super().reset(row["start"])

    seen = [Seen(), Seen()]
    by_trl(tmp_path / "trl", [["a"]], rows=rows, environment_factory=Keeping, reward_funcs=[seen[0]])
    of_trl, given = given, []
    here(tmp_path / "here", [["a"]], rows=rows, environment_factory=Keeping, reward_funcs=[seen[1]])
    assert sorted(given, key=itemgetter("start")) == of_trl == rows  # resets run at once
    assert seen[1].prompts == seen[0].prompts
    assert seen[1].prompts[3] == [{"role": "user", "content": "count 3"}]


BLOCKS = (
    "{%- macro text(m) %}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for b in m['content'] %}{{ b['text'] }}{% endfor %}{% endif %}{% endmacro -%}"
) + agents.TEMPLATE.replace("{{ m['content'] }}", "{{ text(m) }}")


def blocks(*texts):
    return [{"type": "text", "text": text} for text in texts]


class BlocksEnvironment(CounterEnvironment):
    """Answers in content blocks, as servers of the Model Context Protocol do."""

    def reset(self, start: int = 0, **kwargs):
        return blocks(super().reset(start), "!")

    def increment(self, by: int):
        """
        Add to the counter.

        Args:
            by: how much
        """
        return blocks(super().increment(by), ".")


@pytest.mark.parametrize(
    ("environment", "in_dataset"), [(BlocksEnvironment, False), (BlocksEnvironment, True), (EchoEnvironment, True)]
)
def test_content_blocks_give_the_token_ids_of_grpo_trainer(tmp_path, environment, in_dataset, monkeypatch):
    monkeypatch.setattr("helpers.agents.TEMPLATE", BLOCKS)
    rows = ROWS
    if in_dataset:
        rows = [{**row, "prompt": [{**m, "content": blocks(m["content"])} for m in row["prompt"]]} for row in ROWS]
    scripts = [[call("increment", by=2), "a"], ["b"]]
    options = {"rows": rows, "environment_factory": environment}
    seen = [Seen(), Seen()]
    expected = by_trl(tmp_path / "trl", scripts, reward_funcs=[seen[0]], **options)
    assert here(tmp_path / "here", scripts, reward_funcs=[seen[1]], **options) == expected
    # Here the blocks are one text, for templates that know text only.
    for ours, theirs in zip(seen[1].completions + seen[1].prompts, seen[0].completions + seen[0].prompts, strict=True):
        contents = [m["content"] for m in theirs]
        texts = [c if isinstance(c, str) else "".join(block["text"] for block in c) for c in contents]
        assert [m["content"] for m in ours] == texts
