"""A rank's own part of a tensor."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's memory of a DTensor, outside of autograd; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()
