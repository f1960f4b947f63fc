"""Cutting a rollout: whatever its masks, no row is lost or doubled, and no column goes that holds a token."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfppo.rollout import Rollout
from hfppo.state import stream_seed

quick = settings(max_examples=50, deadline=None, database=None, derandomize=True)
PROMPT = ("prompt_ids", "prompt_mask")
OPTIONAL = ("ref_logprobs", "values", "weights", "td_errors", "returns")
EXTREMES = torch.tensor([0.0, -0.0, 1e-38, -1e38, 3e38, float("-inf"), float("inf"), float("nan"), 1.0])


@st.composite
def rollouts(draw, min_rows: int = 1) -> Rollout:
    """Prompts padded on the left, completions on the right, of any lengths, these of 0 too; numbers of any size.

    Padding holds numbers like any other column, so that a wrong cut shows. Scores name the rows.
    """
    rows = draw(st.integers(min_rows, 7))
    prompts, completions = (
        torch.tensor(draw(st.lists(st.integers(least, 5), min_size=rows, max_size=rows))) for least in (1, 0)
    )
    width_p = max(1, int(prompts.max()) + draw(st.integers(0, 2)))
    width_t = max(1, int(completions.max()) + draw(st.integers(0, 2)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def numbers() -> torch.Tensor:
        return EXTREMES[torch.randint(len(EXTREMES), (rows, width_t), generator=generator)]

    mask = torch.arange(width_t) < completions[:, None]
    left_out = draw(st.sets(st.sampled_from(OPTIONAL)))
    return Rollout(
        prompt_ids=torch.randint(100, (rows, width_p), generator=generator),
        prompt_mask=torch.arange(width_p).flip(0) < prompts[:, None],
        completion_ids=torch.randint(100, (rows, width_t), generator=generator),
        mask=mask,
        loss_mask=mask & (torch.rand(rows, width_t, generator=generator) < 0.7),
        truncated=torch.rand(rows, generator=generator) < 0.5,
        scores=torch.arange(rows).float(),
        rollout_logprobs=numbers(),
        old_logprobs=numbers(),
        rewards=numbers(),
        advantages=numbers(),
        **{name: None if name in left_out else numbers() for name in OPTIONAL},
    )


def tokens(rollout: Rollout) -> list[dict[str, list]]:
    """What each row says about its real tokens, prompt and completion, whatever the padding; bit for bit."""

    def bits(tensor: torch.Tensor) -> list:
        return (tensor.view(torch.int32) if tensor.is_floating_point() else tensor).tolist()

    found: list[dict[str, list]] = [{} for _ in range(len(rollout))]
    for name, tensor in rollout.tensors().items():
        mask = rollout.prompt_mask if name in PROMPT else rollout.mask
        for row, content in enumerate(found):
            content[name] = bits(tensor[row][mask[row]] if tensor.dim() == 2 else tensor[row : row + 1])
    return found


def check_shapes(rollout: Rollout) -> None:
    """As the fields are documented: (B, P), (B, T) or (B,), at least one column each."""
    shape_p, shape_t = rollout.prompt_ids.shape, rollout.completion_ids.shape
    assert min(*shape_p, *shape_t) >= 1
    assert shape_p[0] == shape_t[0] == len(rollout)
    for name, tensor in rollout.tensors().items():
        assert tensor.shape == ((len(rollout),) if tensor.dim() == 1 else shape_p if name in PROMPT else shape_t), name


@quick
@given(rollouts())
def test_trimming_takes_padding_and_nothing_else(rollout):
    trimmed = rollout.trim()
    check_shapes(trimmed)
    assert tokens(trimmed) == tokens(rollout)
    for mask, edge in ((trimmed.prompt_mask, 0), (trimmed.mask, -1)):
        assert mask.shape[1] == 1 or mask[:, edge].any()  # nothing is left to trim
    again = trimmed.trim()
    assert all(again.tensors()[name].shape == tensor.shape for name, tensor in trimmed.tensors().items())


@quick
@given(rollouts(), st.data())
def test_rows_are_selected_in_the_order_asked_for(rollout, data):
    rows = data.draw(st.lists(st.integers(0, len(rollout) - 1), min_size=1, max_size=9))
    selected = rollout.select(torch.tensor(rows))
    check_shapes(selected)
    every = tokens(rollout)
    assert tokens(selected) == [every[row] for row in rows]
    assert selected.tensors().keys() == rollout.tensors().keys()


@quick
@given(rollouts(min_rows=2), st.data())
def test_mini_batches_and_their_micro_batches_hold_each_row_once(rollout, data):
    """Sizes that divide, as the configuration asks for."""
    minis = data.draw(st.sampled_from([n for n in range(1, len(rollout) + 1) if len(rollout) % n == 0]))
    size = len(rollout) // minis
    micros = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    every, seed = tokens(rollout), data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    seen = []
    for index in range(minis):
        mini = rollout.mini_batch(index, minis, seed)
        check_shapes(mini)
        pieces = list(mini.micro_batches(micros))
        assert len(mini) == size
        assert len(pieces) == micros
        in_pieces = [row for piece in pieces for row in tokens(piece)]
        assert sorted(map(str, in_pieces)) == sorted(map(str, tokens(mini)))
        for piece in pieces:
            check_shapes(piece)
        seen += in_pieces
    assert sorted(map(str, seen)) == sorted(map(str, every))


def numbered(rows: range) -> Rollout:
    """A rollout whose scores are the numbers of its rows."""
    required = [f.name for f in dataclasses.fields(Rollout) if f.default is dataclasses.MISSING]
    some = dict.fromkeys(required, torch.zeros(len(rows), 1, dtype=torch.bool))
    return Rollout(**{**some, "scores": torch.tensor(rows, dtype=torch.float32)})


def mini_batches(seed: tuple[int, ...], processes: int = 1, group_size: int = 1) -> list[list[float]]:
    """The rows of the three mini-batches of 24 rows, on all processes."""
    size = 24 // processes
    parts = [(p, numbered(range(p * size, (p + 1) * size))) for p in range(processes)]
    return [
        [row for p, part in parts for row in part.mini_batch(index, 3, seed, group_size, p).scores.tolist()]
        for index in range(3)
    ]


def test_each_epoch_shuffles_otherwise():
    epochs = [mini_batches((7, epoch)) for epoch in range(20)]
    assert epochs == [mini_batches((7, epoch)) for epoch in range(20)]
    assert len({str(epoch) for epoch in epochs}) == 20
    for epoch in epochs:
        for rows in epoch:
            assert [row // 3 for row in rows] == list(range(8)), "one of each block"
        assert sorted(row for rows in epoch for row in rows) == list(range(24))


@pytest.mark.parametrize("group_size", [1, 2])
def test_no_number_of_processes_changes_a_mini_batch(group_size):
    alone = mini_batches((3, 1), group_size=group_size)
    assert all(rows[::group_size] == [row - row % group_size for row in rows[::group_size]] for rows in alone)
    assert all(mini_batches((3, 1), n, group_size) == alone for n in (2, 4))


@quick
@given(rollouts(min_rows=2), st.data())
def test_parts_of_a_rollout_join_to_the_whole(rollout, data):
    cut = data.draw(st.integers(1, len(rollout) - 1))
    rows = torch.arange(len(rollout))
    joined = Rollout.join([rollout.select(rows[:cut]), rollout.select(rows[cut:])])
    check_shapes(joined)
    assert tokens(joined) == tokens(rollout)


@quick
@given(st.lists(st.lists(st.integers(-(2**70), 2**70), max_size=4).map(tuple), min_size=2, max_size=9, unique=True))
def test_seeds_differ_and_fit_a_generator(numbers):
    seeds = [stream_seed(*some) for some in numbers]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))


def test_a_seed_does_not_change_between_versions():
    """Checkpoints rest on it: the draws of a resumed run are named by the same numbers."""
    assert stream_seed(3, 1, 0) == 3008725517587348195
