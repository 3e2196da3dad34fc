"""One thread per process: the tests run in several, and their matrices are tiny."""

import torch

torch.set_num_threads(1)
