"""Code that tests share, and scripts that they run in processes of their own. Everything computes on one thread."""

import torch

torch.set_num_threads(1)
