"""Rows of several lengths as one tensor."""

import torch

from hfppo.support.padding import pad_left, pad_right


def test_pad_left():
    ids, mask = pad_left([[5, 6, 7], [8], [9, 1]], padding=1)
    assert ids.tolist() == [[5, 6, 7], [1, 1, 8], [1, 9, 1]]
    assert mask.tolist() == [[True, True, True], [False, False, True], [False, True, True]]  # a real 1 is no padding
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)


def test_pad_right():
    numbers, mask = pad_right([[0.5], [1.0, 2.0]], torch.float32)
    assert numbers.tolist() == [[0.5, 0.0], [1.0, 2.0]]
    assert mask.tolist() == [[True, False], [True, True]]
    assert numbers.dtype == torch.float32
