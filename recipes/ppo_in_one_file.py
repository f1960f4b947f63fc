"""PPO for a language model in one file, with torch, transformers and PEFT, to be read from top to bottom.

    python recipes/ppo_in_one_file.py

It leaves out everything that PPO works without: several processes, GPUs, gradient accumulation, checkpoints, a clip on
the values, an adaptive KL penalty, reward models, tools, vLLM. hfppo has these. This file does not import hfppo, and
tests/test_ppo_in_one_file.py shows that both compute the same numbers.

The task: a small, sloppy model reads 请问1+1=2？ and should answer 是的，等于2！ or, if that is wrong, 不对，等于…！

The method: let the model answer, and score each answer as a whole. A critic predicts the score after each token. Where
a token makes the outcome better than predicted, it becomes likelier, otherwise less likely, in small steps.

Three models share one frozen base:

    actor       the base with a LoRA adapter: the policy π, which is trained
    reference   the actor with its adapter disabled: the policy before training, which π should stay close to
    critic      the base with another LoRA adapter and a linear head: the value V, a prediction of the rewards to come

The letters at the end of a tensor's name are its dimensions:

    B   completions of a rollout; b: of a mini-batch
    T   tokens of the longest completion
    L   columns: a prompt, its completion, padding
    S   states, L − 1: in state s the policy has read columns 0 to s, and its action is the token in column s + 1
    V   tokens of the vocabulary
"""

import hashlib
import inspect
import json
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, HfArgumentParser, set_seed


@dataclass
class Settings:
    """Each field is also a flag, such as `--kl_coef 0.1`."""

    folder: str = str(Path(__file__).parent / "arithmetic")  # has base/, train.jsonl and test.jsonl
    seed: int = 0
    lora_rank: int = 16
    lora_alpha: int = 32
    # A rollout is a set of completions of the present policy. It is used for a few optimizer steps and thrown away.
    num_rollouts: int = 40
    rollout_size: int = 128  # completions
    max_completion_length: int = 12  # tokens
    # Each epoch shuffles the rollout and cuts it into mini-batches. Each mini-batch is one optimizer step.
    num_epochs: int = 2
    mini_batch_size: int = 64  # completions; must divide rollout_size
    learning_rate: float = 1e-3  # at first; falls linearly to 0. Models from 0.5B on need 1e-5 to 5e-5
    max_grad_norm: float = 1.0
    kl_coef: float = 0.02  # β, the price of a nat between policy and reference, in units of reward
    gamma: float = 1.0  # γ, the discount of a reward for each token until it comes
    lam: float = 1.0  # λ: 0 trusts the critic's predictions, 1 the rewards of this one completion
    cliprange: float = 0.2  # ε: a token is pushed no further once its probability has changed by this share
    value_coef: float = 1.0


def right_answer(completion: str, answer: str) -> float:
    """Return the score of a completion: 1 if every character is right, else 0."""
    return float(completion == answer)


ORDER, SAMPLING, SHUFFLE = 1, 2, 4  # uses of random numbers


def seed_of(*name: int) -> int:
    """Return a seed for a name such as (seed, use, number): every draw has its own, so no draw changes another."""
    return int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=8).digest(), "big") >> 1


def generator(*name: int) -> torch.Generator:
    """Return the random generator of a name."""
    return torch.Generator().manual_seed(seed_of(*name))


def endless(rows: list[dict], seed: int) -> Iterator[dict]:
    """Yield all rows in random order, then all again in another order, and so on."""
    for epoch in count():
        for i in torch.randperm(len(rows), generator=generator(seed, ORDER, epoch)).tolist():
            yield rows[i]


class Critic(nn.Module):
    """The base without its output head, with a LoRA adapter and a head that turns each state into one number."""

    def __init__(self, base, lora: LoraConfig):
        super().__init__()
        # Copy the modules, into which PEFT puts the adapter, but not their tensors: the base is in memory once.
        shared = {id(x): x for x in [*base.parameters(), *base.buffers()]}
        self.trunk = get_peft_model(deepcopy(base.base_model, memo=shared), lora)
        self.head = nn.Linear(base.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)  # before the first step all values are 0
        nn.init.zeros_(self.head.bias)

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Return the value of each state, (B, S)."""
        return self.head(self.trunk(input_ids=ids_BL[:, :-1]).last_hidden_state).squeeze(-1)


def load(s: Settings):
    """Return tokenizer, actor and critic."""
    set_seed(s.seed)  # for the adapters B·A: A is random and B is 0, so the actor begins as the reference
    tokenizer = AutoTokenizer.from_pretrained(f"{s.folder}/base")
    base = AutoModelForCausalLM.from_pretrained(f"{s.folder}/base")
    lora = LoraConfig(r=s.lora_rank, lora_alpha=s.lora_alpha, target_modules="all-linear")
    critic = Critic(base, deepcopy(lora))
    actor = get_peft_model(base, lora)
    return tokenizer, actor.eval(), critic.eval()  # eval mode also in training: dropout would disturb the ratio


def token_logprobs(actor, ids_BL: Tensor) -> Tensor:
    """Return the log-probability of each action, (B, S)."""
    logprobs_BSV = actor(input_ids=ids_BL[:, :-1]).logits.log_softmax(-1)
    return logprobs_BSV.gather(-1, ids_BL[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def sample(actor, tokenizer, prompts: list[list[int]], length: int, seeds: list[int] | None) -> list[list[int]]:
    """Complete each prompt up to its end of sequence or `length` tokens; without seeds, take the likeliest tokens."""
    # With padding on the left, all prompts end in one column, and the next tokens make up the column after it.
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    ids, mask, cache = padded["input_ids"], padded["attention_mask"], DynamicCache()
    name = "cache" if "cache" in inspect.signature(actor.get_base_model().forward).parameters else "past_key_values"
    if seeds is not None:
        uniforms_BT = torch.stack([torch.rand(length, generator=generator(x), dtype=torch.float64) for x in seeds])
    completions: list[list[int]] = [[] for _ in prompts]
    for t in range(length):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]  # padding does not count
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        logits_BV = actor(**inputs, **{name: cache}, use_cache=True).logits[:, -1]
        if seeds is None:
            ids = logits_BV.argmax(-1, keepdim=True)
        else:  # the first token at which the sum of probabilities exceeds the random number
            sums_BV = logits_BV.softmax(-1).double().cumsum(-1)
            ids = torch.searchsorted(sums_BV, uniforms_BT[:, t, None] * sums_BV[:, -1:], right=True)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        for completion, token in zip(completions, ids.squeeze(1).tolist(), strict=True):
            if completion[-1:] != [tokenizer.eos_token_id]:
                completion.append(token)
        if all(completion[-1] == tokenizer.eos_token_id for completion in completions):
            break
    return completions


def pad(rows: list[list]) -> Tensor:
    """Return rows of different lengths as one tensor, with zeros on the right."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def gae(rewards_BS: Tensor, values_BS: Tensor, gamma: float, lam: float) -> Tensor:
    """Return advantages, (B, S): how much better each action turned out than the critic had predicted.

        δ_s = r_s + γ·V_{s+1} − V_s,   A_s = δ_s + γλ·A_{s+1}   (arXiv:1506.02438, eq. 16)

    Rewards and values must be 0 after a completion's last token.
    """
    advantages_BS = torch.zeros_like(values_BS)
    next_value_B = next_advantage_B = torch.zeros(len(values_BS))
    for s in reversed(range(values_BS.shape[1])):
        delta_B = rewards_BS[:, s] + gamma * next_value_B - values_BS[:, s]
        advantages_BS[:, s] = next_advantage_B = delta_B + gamma * lam * next_advantage_B
        next_value_B = values_BS[:, s]
    return advantages_BS


@dataclass
class Rollout:
    """A rollout, and the losses of the optimizer steps on it."""

    completions: list[str]
    scores_B: Tensor
    ids_BL: Tensor
    mask_BS: Tensor  # True where the action is a token of the completion; other numbers have no meaning
    tokens: dict[str, Tensor]  # (B, S) numbers by name
    losses: list[tuple[float, float]]  # of policy and value for each step


def train(s: Settings, tokenizer, actor, critic, rows: list[dict]) -> Iterator[Rollout]:
    """Train actor and critic, and yield each rollout after the optimizer steps on it."""
    actor_weights, critic_weights = ([p for p in m.parameters() if p.requires_grad] for m in (actor, critic))
    optimizer = torch.optim.AdamW([*actor_weights, *critic_weights], lr=s.learning_rate, weight_decay=0.0)
    num_steps = s.num_rollouts * s.num_epochs * s.rollout_size // s.mini_batch_size
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    stream = endless(rows, s.seed)

    for number in range(1, s.num_rollouts + 1):
        # 1. Take the next prompts.
        batch = list(islice(stream, s.rollout_size))
        prompts = tokenizer([row["prompt"] for row in batch])["input_ids"]

        # 2. Sample a completion of each, with the probabilities as they are: no other temperature, no top-p.
        first = (number - 1) * s.rollout_size
        seeds = [seed_of(s.seed, SAMPLING, first + i) for i in range(s.rollout_size)]
        completions = sample(actor, tokenizer, prompts, s.max_completion_length, seeds)

        # 3. Score the completions.
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        scores_B = torch.tensor([right_answer(text, row["answer"]) for text, row in zip(texts, batch, strict=True)])

        # 4. Join prompts and completions. No token sees the padding to its right, so an attention mask is not needed.
        pairs = list(zip(prompts, completions, strict=True))
        ids_BL = pad([prompt + completion for prompt, completion in pairs])
        mask_BS = pad([[False] * (len(prompt) - 1) + [True] * len(completion) for prompt, completion in pairs])
        # The last action is taken one state before the last column.
        last_B = torch.tensor([len(prompt) + len(completion) - 2 for prompt, completion in pairs])

        # 5. Ask the three models about each token, before the optimizer changes two of them.
        with torch.no_grad():
            old_logprobs_BS = token_logprobs(actor, ids_BL)
            with actor.disable_adapter():
                ref_logprobs_BS = token_logprobs(actor, ids_BL)
            values_BS = critic(ids_BL) * mask_BS

        # 6. Rewards: the last token earns the score, and each token pays for the distance to the reference.
        kl_BS = (old_logprobs_BS - ref_logprobs_BS) * mask_BS  # its mean over samples is the KL divergence
        rewards_BS = -s.kl_coef * kl_BS
        rewards_BS[torch.arange(s.rollout_size), last_B] += scores_B

        # 7. Returns for the critic, and advantages for the actor. Advantages are brought to mean 0 and variance 1, so
        #    that the size of the rewards does not matter.
        advantages_BS = gae(rewards_BS, values_BS, s.gamma, s.lam)
        returns_BS = advantages_BS + values_BS
        real = advantages_BS[mask_BS]
        advantages_BS = (advantages_BS - real.mean()) / (real.var(correction=0) + 1e-8).sqrt()

        # 8. Optimizer steps. The ratio says how much likelier an action has become since it was sampled. Once it has
        #    changed by ε in the direction of its advantage, the clip stops it: the samples say little about a policy
        #    that is far from the one that made them.
        losses = []
        for epoch in range(s.num_epochs):
            draws = [generator(s.seed, SHUFFLE, number, epoch, block) for block in range(s.mini_batch_size)]
            places = [torch.randperm(s.rollout_size // s.mini_batch_size, generator=draw) for draw in draws]
            for b in torch.stack(places, 1) + torch.arange(0, s.rollout_size, len(places[0])):  # one of each block
                mask_bS, advantages_bS = mask_BS[b], advantages_BS[b]
                ratio_bS = (token_logprobs(actor, ids_BL[b]) - old_logprobs_BS[b]).exp()  # 1 in the first step
                clipped_bS = ratio_bS.clamp(1 - s.cliprange, 1 + s.cliprange)
                objective_bS = torch.min(ratio_bS * advantages_bS, clipped_bS * advantages_bS)
                policy_loss = -objective_bS[mask_bS].mean()  # arXiv:1707.06347, eq. 7
                value_loss = (critic(ids_BL[b]) - returns_BS[b])[mask_bS].square().mean() / 2
                (policy_loss + s.value_coef * value_loss).backward()
                for weights in (actor_weights, critic_weights):  # apart, so that neither shrinks the other's gradient
                    nn.utils.clip_grad_norm_(weights, s.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append((policy_loss.item(), value_loss.item()))

        tokens = {"log π_old": old_logprobs_BS, "log π_ref": ref_logprobs_BS, "KL": kl_BS, "reward": rewards_BS}
        tokens |= {"value": values_BS, "return": returns_BS, "advantage": advantages_BS}
        yield Rollout(texts, scores_B, ids_BL, mask_BS, tokens, losses)


def accuracy(s: Settings, tokenizer, actor, rows: list[dict]) -> float:
    """Return the share of right answers if the likeliest token is always taken."""
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    completions = sample(actor, tokenizer, prompts, s.max_completion_length, seeds=None)
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return sum(right_answer(text, row["answer"]) for text, row in zip(texts, rows, strict=True)) / len(rows)


def print_tokens(r: Rollout, tokenizer) -> None:
    """Print the numbers of the first completion, one line per token."""
    print(*(f"{name:>10}" for name in r.tokens), "  token")
    for s in r.mask_BS[0].nonzero().flatten():
        print(*(f"{x_BS[0, s]:10.4f}" for x_BS in r.tokens.values()), f"  {tokenizer.decode(r.ids_BL[0, s + 1])}")


def main() -> None:
    (s,) = HfArgumentParser(Settings).parse_args_into_dataclasses()
    torch.set_num_threads(1)  # more threads cost such a small model more than they save
    files = (Path(s.folder, f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in ("train", "test"))
    train_rows, test_rows = ([json.loads(line) for line in lines] for lines in files)
    tokenizer, actor, critic = load(s)
    began = time.perf_counter()
    print(f"greedy accuracy on the test file: {accuracy(s, tokenizer, actor, test_rows):.3f}")
    for number, r in enumerate(train(s, tokenizer, actor, critic, train_rows), 1):
        kl, value = (r.tokens[name][r.mask_BS].mean() for name in ("KL", "value"))
        print(f"rollout {number:2}: reward {r.scores_B.mean():.3f}, KL per token {kl:.3f}, mean value {value:.3f}")
        if number in (1, s.num_rollouts):
            print_tokens(r, tokenizer)
    print(f"greedy accuracy on the test file: {accuracy(s, tokenizer, actor, test_rows):.3f}")
    print(f"{time.perf_counter() - began:.0f} seconds")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # characters that the terminal lacks
    main()
