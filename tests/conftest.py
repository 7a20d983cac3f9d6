"""One CPU thread: the models here are small, and two threads that wait for each other are slow."""

import torch

torch.set_num_threads(1)
