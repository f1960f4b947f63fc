"""The matrix products of a rollout and its updates, and how many of them this machine does in a second."""

import time

import torch
from ppo_workload import Workload, prompts_for


def operations(workload: Workload, critic: str) -> dict[str, float]:
    """Floating-point operations by phase: a product of (m, k) and (k, n) has 2·m·k·n, nothing else counts.

    With N real tokens in all rows (prompts and completions, no padding), C of them completions, P weights in the
    linear layers of the trunk, L in their adapters, H in the output head, and A for attention: two products in each
    layer, over n²/2 pairs of tokens and the whole width, in all 2·layers·width·n² for a row of n tokens:

        sampling, with a KV cache   2·(P + L)·N + 2·H·C + A
        old log-probs               the same, once more
        reference                   2·P·N + 2·H·C + A
        reward model                2·P·N + A
        values                      2·(P + L)·N + A, nothing if the critic shares the states of the old log-probs
        update, forward             as old log-probs and as values, in each epoch
        update, backward            2·P·N + 4·L·N + 2·H·C + 2·A: frozen weights pass the gradient on and get none
                                    themselves; trained ones, the adapters, get one of their own

    What is computed again to save memory does not count, and what other programs train besides does not either.
    """
    w = workload
    head_width = w.hidden_size // w.num_attention_heads
    kv = head_width * w.num_key_value_heads
    shapes = [(w.hidden_size, w.hidden_size)] * 2 + [(w.hidden_size, kv)] * 2  # q, o; k, v
    shapes += [(w.hidden_size, w.intermediate_size)] * 3  # gate, up, down
    trunk = w.num_hidden_layers * sum(a * b for a, b in shapes)
    adapters = w.num_hidden_layers * w.rank * sum(a + b for a, b in shapes)
    head = 2 * w.hidden_size * w.vocab_size * w.prompts * w.new_tokens
    lengths = [len(prompt) + w.new_tokens for prompt in prompts_for(w)]
    tokens, attention = sum(lengths), 2 * w.num_hidden_layers * w.hidden_size * sum(n**2 for n in lengths)
    frozen, adapted = 2 * trunk * tokens + attention, 2 * (trunk + adapters) * tokens + attention
    backward = 2 * (trunk + 2 * adapters) * tokens + 2 * attention
    own_trunk = critic != "shared"
    return {
        "sampling": adapted + head,
        "reward model": frozen,
        "old log-probs": adapted + head,
        "reference": frozen + head,
        "values": own_trunk * adapted,
        "actor forward": w.epochs * (adapted + head),
        "critic forward": w.epochs * own_trunk * adapted,
        "critic backward": w.epochs * own_trunk * backward,
        "actor backward": w.epochs * (backward + head),
    }


def rate(rows: int, inner: int, columns: int, dtype: str, repeats: int = 50) -> float:
    """Operations per second of the product of (rows, inner) and (inner, columns); the best of some, as a floor wants.

    On a CPU per second of a processor, of which there is one for each thread; on a GPU per second.
    """
    cuda = torch.cuda.is_available()
    options = {"device": "cuda" if cuda else "cpu", "dtype": getattr(torch, dtype)}
    x = torch.randn(rows, inner, **options)
    weight = torch.randn(columns, inner, **options).t()
    number = 2 * rows * inner * columns
    each = max(1, int(2e8 / number))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(each):
            torch.mm(x, weight)
        if cuda:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / each)
    return number / best / (1 if cuda else torch.get_num_threads())
