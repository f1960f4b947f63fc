"""A tokenizer that calls tools, a sampler that plays turns from a script, and environments."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from helpers.runs import SMALL
from helpers.tiny import LORA, tiny_model
from hfppo import PPOConfig, PPOTrainer, Result, Rollout, Sampler, TextEnvironment, Transcript, Turn
from hfppo.metrics import Meter

PAD, EOS, USER, ASSISTANT, TOOL, CALL, END = "<pad>", "<eos>", "<user>", "<assistant>", "<tool>", "<call>", "</call>"
SPECIAL = [PAD, EOS, USER, ASSISTANT, TOOL, CALL, END]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 <>/()=,.?!_{}:'\"[]-+"

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}<tool>{{ m['content'] }}<eos>"
    "{% else %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<call>{{ c['function']['name'] }}("
    "{% for k, v in c['function']['arguments'].items() %}{{ k }}={{ v }}{{ ',' if not loop.last }}{% endfor %})</call>"
    "{% endfor %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>(?P<name>[a-z_]+)\(",
            "close_pattern": r"\)</call>",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"line_sep": ",", "kv_sep": "="},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<eos>", "content": "text"},
    },
}


def calling_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, and special tokens for roles and calls: open(key=3) is a call between <call> and </call>."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    made.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, eos_token=EOS, extra_special_tokens=SPECIAL[2:], padding_side="left"
    )
    wrapped.chat_template, wrapped.response_template = TEMPLATE, RESPONSE
    return wrapped


# The metrics of METRICS that only a run with tools or environments has; tests/test_episodes.py sees each of them.
EPISODE_METRICS = {
    "completions/mean_context_length", "turns/mean", "turns/max", "turns/reward", "turns/cut_frac",
    "turns/unfinished_frac", "turns/dropped_result_frac", "tools/call_frequency", "tools/failure_frequency",
    "tools/unknown_frac", "tools/timeout_frac", "tools/malformed_frac", "value/turn_explained_variance",
    "time/environments",
}  # fmt: skip

VOCAB_SIZE = len(SPECIAL) + len(LETTERS)


def call(name: str, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return f"{CALL}{name}({','.join(f'{k}={v}' for k, v in arguments.items())}){END}"


class Script(Sampler):
    """Plays turns from a script: row i of the first call plays script i, a turn per call.

    A row is known by the beginning of its prompt, which must differ between the rows.

    Args:
        turns: of each row, as text; EOS is added unless the text ends with "…".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *turns: Sequence[str]):
        self.tokenizer, self.turns = tokenizer, turns
        self.prompts: list[list[int]] = []
        self.calls: list[int] = []  # rows of each call

    def __call__(self, given, seeds, budgets=None) -> list[Turn]:
        self.calls.append(len(given))
        if len(self.calls) == 1:
            self.prompts, self.taken = given, [0] * len(given)
        rows = []
        for ids, budget in zip(given, budgets or [None] * len(given), strict=True):
            row = next(i for i, p in enumerate(self.prompts) if ids[: len(p)] == p and self.left(i))
            text = self.turns[row % len(self.turns)][self.taken[row]]
            self.taken[row] += 1
            end = "" if text.endswith("…") else EOS
            rows.append(self.tokenizer(text.removesuffix("…") + end, add_special_tokens=False)["input_ids"][:budget])
        eos = self.tokenizer.eos_token_id
        return [Turn.up_to_end(ids, [-0.5] * len(ids), [eos]) for ids in rows]

    def left(self, row: int) -> bool:
        return self.taken[row] < len(self.turns[row % len(self.turns)])


class Doors:
    """Three doors; key k opens door k. The class is written for TRL, but for the rewards of its results."""

    def reset(self, start: int = 0, seed: int = 0, **row) -> str:
        self.door, self.seed = start, seed
        return f"door {start}"

    def open(self, key: int) -> str:
        """
        Open the door.

        Args:
            key: the number of the key
        """
        if key != self.door:
            return Result("no", reward=-0.25)
        self.door += 1
        return Result("yes", reward=1.0, done=self.door == 3)

    def look(self) -> str:
        """Look at the door."""
        return f"door {self.door}"


class Counting(TextEnvironment):
    """Asks for the next number; ends after three right ones."""

    def reset(self, start: int = 0, **row) -> str:
        self.next = start
        return f"{self.next}"

    def step(self, text: str):
        if text != str(self.next + 1):
            return "no", -0.5, False, False, {}
        self.next += 1
        return f"{self.next}", 1.0, self.next == 3, self.next == 7, {}


PROMPTS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"go {n} "}], "start": n % 3} for n in range(4)])


def agent_trainer(output_dir, *turns, config=None, dataset=PROMPTS, positions=256, **kwargs) -> PPOTrainer:
    """A small trainer with tools or an environment, and a script in place of the sampler.

    Args:
        turns: of each row, for `Script`; none: the trainer's own sampler.
    """
    settings = {"output_dir": str(output_dir), "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none"}
    settings |= {"max_completion_length": 120, "num_ppo_epochs": 1, "num_mini_batches": 1, "max_steps": 2}
    tokenizer = calling_tokenizer()
    trainer = PPOTrainer(
        model=tiny_model(vocab_size=VOCAB_SIZE, max_position_embeddings=positions),
        args=PPOConfig(**{**settings, **(config or {})}),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=LORA,
        **kwargs,
    )
    if turns:
        trainer.collector = replace(trainer.collector, sampler=Script(tokenizer, *turns))
    return trainer


def collect(trainer, count=None, training=False):
    """Return a rollout, its transcript, and its metrics."""
    rows = trainer.collector.eval_rows(trainer._train_prompts)[:count]
    collected = trainer.collector.collect(rows, trainer.ppo_state, trainer.state, training)
    return collected.rollout, collected.transcript, Meter(collected.measures).read()


@dataclass(frozen=True)
class Played:
    """A rollout of episodes; its metrics are those of training."""

    trainer: PPOTrainer
    rollout: Rollout
    transcript: Transcript
    metrics: dict[str, float]

    def text(self, row: int = 0, mask: Tensor | None = None) -> str:
        """A row's completion, or its tokens in a mask."""
        return text_of(self.trainer, self.rollout, row, mask)

    def prompt(self, row: int = 0) -> str:
        """A row's prompt with the text of `reset`."""
        ids = self.rollout.prompt_ids[row][self.rollout.prompt_mask[row]]
        return self.trainer.processing_class.decode(ids)

    def said(self, role: str = "tool", row: int = 0) -> list[str]:
        """What the messages of a role say in a row's completion."""
        return [message["content"] for message in self.transcript.completions[row] if message["role"] == role]

    def roles(self, row: int = 0) -> str:
        """The first letters of the roles in a row's completion."""
        return "".join(message["role"][0] for message in self.transcript.completions[row])


def play(make_agent, *turns, count: int | None = 1, training=True, prepare=lambda trainer: None, **kwargs) -> Played:
    """Play the episodes of the first rows, all for None; the reward of tools alone is the number of messages.

    Args:
        prepare: called with the trainer.
    """
    given = kwargs if "environment_factory" in kwargs else {"reward_funcs": count_messages, **kwargs}
    trainer = make_agent(*turns, **given)
    prepare(trainer)
    return Played(trainer, *collect(trainer, count, training))


def text_of(trainer, rollout, row=0, mask=None):
    """Return the text of a row's completion, or of its tokens in a mask."""
    chosen = rollout.real[row] if mask is None else mask[row]
    return trainer.processing_class.decode(rollout.completion_ids[row][chosen])


def count_messages(completions, **_):
    """A reward function: the messages of a completion."""
    return [float(len(messages)) for messages in completions]


def add(a: int, b: int) -> str:
    """
    Add two numbers.

    Args:
        a: one
        b: another
    """
    return str(a + b)


def tool(body, asynchronous: bool = False):
    """A tool `use(number: int)` with this body."""

    def use(number: int) -> str:
        return body(number)

    async def later(number: int) -> str:
        return await body(number)

    chosen = later if asynchronous else use
    chosen.__name__, chosen.__doc__ = "use", "Use it.\n\nArgs:\n    number: a number"
    return chosen


def hide_async(method):
    """An ordinary decorator: it returns the coroutine, and looks like a plain function."""

    @functools.wraps(method)
    def inner(*args, **kwargs):
        return method(*args, **kwargs)

    return inner


class Chatter(TextEnvironment):
    """Answers each turn by its length; how many turns there are follows from the seed, the reward from the letters."""

    resets = 0  # of all instances

    def reset(self, seed: int = 0, **row) -> str:
        Chatter.resets += 1
        self.left = 1 + seed % 4
        return f" {seed % 10}"

    def step(self, text: str):
        self.left -= 1
        reward = sum(letter in "aeiou" for letter in text) / max(len(text), 1)
        return f"{len(text)}", reward, self.left == 0, False, {}


TALKING = {**SMALL, "max_completion_length": 40, "gamma_turn": 0.9, "lam_turn": 0.7}
TALK = Dataset.from_list([{"prompt": [{"role": "user", "content": f"hi {n}"}]} for n in range(16)])


def end_of_turn_ids() -> list[int]:
    """The ids of EOS and of each sixth letter, so that a model with random weights ends its turns early."""
    return [1, *range(len(SPECIAL), VOCAB_SIZE)[::6]]


def talking_trainer(output_dir, config=None, **kwargs) -> PPOTrainer:
    """A trainer whose small model, a sixth of whose letters end a turn, talks to `Chatter`."""
    model = tiny_model(vocab_size=VOCAB_SIZE, max_position_embeddings=256, seed=1)
    model.generation_config.eos_token_id = end_of_turn_ids()
    given = {"model": model, "environment_factory": Chatter, "train_dataset": TALK, "peft_config": LORA}
    args = PPOConfig(**{"output_dir": str(output_dir), **TALKING, **(config or {})})
    return PPOTrainer(args=args, processing_class=calling_tokenizer(), **{**given, **kwargs})
