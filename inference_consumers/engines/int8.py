"""Linear layers with 8-bit weights and 8-bit activations.

Weights are scaled per output and rounded once; activations per row, when they come (Dettmers et al. 2022, "LLM.int8()",
section 3.1, vector-wise quantization, without its outlier columns). Sums of products of integers are exact: a row's
result does not depend on its neighbours in a batch. On a CPU with VNNI all-MiniLM-L6-v2 took three
quarters of the processor time of float32.
"""

import torch
from torch import nn

# On CUDA the kernel takes only more rows than this, and sides that are multiples of 8.
_CUDA_LEAST_ROWS = 17
_CUDA_SIDE = 8
_LARGEST = 127


class Int8Linear(nn.Module):
    """Quantized replacement of an ``nn.Linear`` with the same input and output, NaN and infinity included."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = _scale(weight)
        self.out_features = linear.out_features
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.squeeze(-1))
        self.bias = linear.bias

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """From (..., inputs) to (..., outputs)."""
        rows = activations.reshape(-1, activations.shape[-1]).float()
        scale = _scale(rows)
        integers = (rows / scale).round_().to(torch.int8)
        if integers.is_cuda and len(integers) < _CUDA_LEAST_ROWS:
            integers = nn.functional.pad(integers, (0, 0, 0, _CUDA_LEAST_ROWS - len(integers)))
        products = torch._int_mm(integers, self.weight.t())[: len(rows)]
        outputs = products.float().mul_(scale).mul_(self.scale)
        if self.bias is not None:
            outputs.add_(self.bias)
        return outputs.to(activations.dtype).reshape(*activations.shape[:-1], self.out_features)


def quantize_linears(network: nn.Module) -> None:
    """Replace every linear layer in place; those whose sides the kernel cannot take stay as they are."""
    for name, child in list(network.named_children()):
        if type(child) is nn.Linear and not (child.in_features % _CUDA_SIDE or child.out_features % _CUDA_SIDE):
            setattr(network, name, Int8Linear(child))
        else:
            quantize_linears(child)


def _scale(rows: torch.Tensor) -> torch.Tensor:
    """Of shape (rows, 1), never 0."""
    return (rows.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
