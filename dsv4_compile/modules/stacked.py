"""Linears of one input, stacked into one matrix, so that one GEMM computes them all.

Every linear keeps its module, its parameters and their names. Only the memory is shared: the weights become
consecutive rows of one matrix. Nothing is copied at use, nothing is stored twice, and loading a parameter writes the
matrix. The storage object of a parameter spans its own rows only, because savers take tensors with one storage for tied
weights and write the whole storage of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import dlpack

from ..layout import WEIGHT_TILE
from .linear import Fp8Linear, Linear, linear, linear_fp32

AnyLinear = Linear | Fp8Linear


class Projection(NamedTuple):
    """A result to compute: the outputs of `parts` side by side, in float32 or in the input's dtype."""

    parts: tuple[AnyLinear, ...]
    float32: bool = False


def stacks(
    projections: Sequence[Projection], single_gemm: bool | None = None, known: Sequence[Tensor] = ()
) -> nn.ModuleList:
    """Return the fewest `Stack`s for `projections`, in order: neighbours with weights of one kind share a stack.

    Weights that are the rows of one of the matrices `known` stay there.
    """

    def kind(projection: Projection) -> tuple[Any, ...]:
        layer = projection.parts[0]
        weight = layer.weight if isinstance(layer, (Linear, Fp8Linear)) else None
        return type(layer), None if weight is None else (weight.dtype, weight.device, weight.shape[1])

    return nn.ModuleList(Stack(tuple(group), single_gemm, known) for _, group in groupby(projections, kind))


def project(x: Tensor, projections: Sequence[Projection], stacked: nn.ModuleList) -> list[Tensor]:
    """Compute `projections` of x with their `stacks`, or one by one if a linear was replaced since."""
    stacks: list[Any] = list(stacked)
    held = [layer for stack in stacks for layer in stack.parts]
    wanted = [layer for projection in projections for layer in projection.parts]
    # Lists, not generators: Dynamo traces the frame of a generator again for each element.
    if len(held) == len(wanted) and False not in [a is b for a, b in zip(held, wanted, strict=True)]:
        if len(stacks) == 2:
            fused = stacks[0].fused_with(stacks[1], x)
            if fused is not None:
                return fused
        return [result for stack in stacks for result in stack(x)]
    return [_unstacked(projection, x) for projection in projections]


class Stack(nn.Module):
    """Linears of one input. `forward` returns one tensor for each projection, slices of one GEMM's result if possible.

    Args:
        projections: results to compute; those in float32 come last.
        single_gemm: compute results of both dtypes in one GEMM with a float32 result, and round the others after it,
            as a GEMM in their dtype would. None: on CUDA, where it saves a launch, but not on a CPU, where bfloat16
            weights would have to be widened at each call; two GEMMs over disjoint rows run there.
        known: matrices that the weights may be the rows of already.

    The weights are stacked if they are of one kind; `reason` says why they are not, "" if they are. `arrange` stacks
    them again after a parameter got other storage. It runs after `to` and its variants, load_state_dict, copying and
    unpickling, and at each call that is not compiled. After `parameter.data = ...` on a compiled module call it.
    """

    weight: Tensor | None
    scale: Tensor | None

    def __init__(
        self, projections: tuple[Projection, ...], single_gemm: bool | None = None, known: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self.projections = projections
        self.single_gemm = single_gemm
        self.widths: list[int] = []
        self.first_float32 = next(
            (i for i, projection in enumerate(projections) if projection.float32), len(projections)
        )
        self.register_buffer("weight", None, persistent=False)
        self.register_buffer("scale", None, persistent=False)
        self.reason = ""
        self.arrange(known)

    @property
    def parts(self) -> tuple[AnyLinear, ...]:
        """All linears, in the order of their rows."""
        return tuple([layer for projection in self.projections for layer in projection.parts])

    def arrange(self, known: Sequence[Tensor] = ()) -> None:
        """Make the weights rows of one matrix, in place, unless they are already or cannot be."""
        self.reason = why_unsupported(self.parts)
        if not self.reason:
            self.widths = [sum(layer.weight.shape[0] for layer in projection.parts) for projection in self.projections]
        # Parameters must not become inference tensors, which could not be loaded into later.
        with torch.inference_mode(False), torch.no_grad():
            self.weight = None if self.reason else as_rows([layer.weight for layer in self.parts], self.weight, *known)
            scales = [layer.scale for layer in self.parts if isinstance(layer, Fp8Linear)]
            self.scale = None if self.reason or not scales else as_rows(scales, self.scale, *known)

    def release(self) -> None:
        """Move the weights to memory that is theirs alone, until `arrange` stacks them again."""
        if self.weight is not None:
            release_rows(parameter for layer in self.parts for parameter in layer.parameters())
        self.weight = self.scale = None

    def _intact(self) -> bool:
        """Return whether floating weights are still the rows of `weight`, cheaply enough for every call."""
        weights = [layer.weight for layer in self.parts]
        return self.weight is not None and self.scale is None and are_rows(weights, self.weight)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return a tensor `[T, width]` for each projection of x `[T, K]`, its last dim dense."""
        # Not `is_compiling`, which is true in all threads while one compiles.
        if not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or self._intact()):
            self.arrange()
        if self.weight is None or (self.scale is None and x.dtype is not self.weight.dtype):
            return [_unstacked(projection, x) for projection in self.projections]
        narrow = self.widths[: self.first_float32]
        if self.scale is not None:
            quantize = self.projections[0].parts[0].quantize_input
            return list(torch.ops.dsv4.fp8_linear(x, self.weight, self.scale, quantize).split(self.widths, dim=-1))
        if x.dtype is torch.float32 or len(narrow) == len(self.widths):
            return list(linear(x, self.weight).split(self.widths, dim=-1))
        if not narrow or (x.is_cuda if self.single_gemm is None else self.single_gemm):
            results = linear_fp32(x, self.weight).split(self.widths, dim=-1)
            return [*(result.to(x.dtype) for result in results[: len(narrow)]), *results[len(narrow) :]]
        rows = sum(narrow)
        rounded = linear(x, self.weight[:rows]).split(narrow, dim=-1)
        return [*rounded, *linear_fp32(x, self.weight[rows:]).split(self.widths[len(narrow) :], dim=-1)]

    def fused_with(self, other: Stack, x: Tensor) -> list[Tensor] | None:
        """Return the results of this stack and of `other` from one op, or None if they take two.

        This stack has e4m3 weights and `other` floating ones. The op is one launch for few tokens, with a float32
        result that is rounded after it. It is used on CUDA, or as `single_gemm` says.
        """
        for stack in (self, other):
            if not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or stack._intact()):
                stack.arrange()
        together = x.is_cuda if self.single_gemm is None else self.single_gemm
        if self.scale is None or self.weight is None or other.weight is None or other.scale is not None:
            return None
        if not together or x.dtype is not other.weight.dtype or x.dtype is torch.float32:
            return None
        quantize = self.projections[0].parts[0].quantize_input
        results = torch.ops.dsv4.fp8_linear(x, self.weight, self.scale, quantize, other.weight)
        parts = results.split([*self.widths, *other.widths], dim=-1)
        both = [*self.projections, *other.projections]
        return [result if of.float32 else result.to(x.dtype) for of, result in zip(both, parts, strict=True)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stack:
        """Stack again: the linears are registered before the stack and have each been converted into new storage."""
        self.weight = self.scale = None
        super()._apply(fn, recurse)
        self.arrange()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.arrange()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the matrices, which a copy builds from the parameters."""
        return {**self.__dict__, "_buffers": dict.fromkeys(self._buffers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.arrange()

    def extra_repr(self) -> str:
        return self.reason or f"{' + '.join(map(str, self.widths))} rows of one matrix"


def _unstacked(projection: Projection, x: Tensor) -> Tensor:
    """Compute `projection`, each of its linears by itself."""
    results = [linear_fp32(x, layer.weight) if projection.float32 else layer(x) for layer in projection.parts]
    return results[0] if len(results) == 1 else torch.cat(results, dim=-1)


def why_unsupported(parts: Sequence[AnyLinear]) -> str:
    """Return why the weights of `parts` cannot be rows of one matrix, or ""."""
    first = parts[0]
    if len(parts) == 1:
        return "nothing to stack"
    for layer in parts:
        if type(layer) not in (Linear, Fp8Linear) or type(layer) is not type(first):
            return f"a {type(layer).__name__} with a {type(first).__name__}"
        for name, parameter in layer.named_parameters(recurse=False):
            if type(parameter) is not nn.Parameter:
                return f"a parameter of type {type(parameter).__name__}"
            model = first.get_parameter(name)
            if (parameter.dtype, parameter.device) != (model.dtype, model.device):
                return f"{parameter.dtype} on {parameter.device} with {model.dtype} on {model.device}"
            if parameter.shape[1:] != model.shape[1:]:
                return "inputs of different widths"
            if in_shared_memory(parameter):
                return "a weight in shared memory"
    if len({id(layer.weight) for layer in parts}) < len(parts):
        return "a weight that is used twice"
    if isinstance(first, Fp8Linear):
        if any(layer.weight.shape[0] % WEIGHT_TILE for layer in parts[:-1]):
            return f"a weight whose rows end within a block of {WEIGHT_TILE}"
        if len({layer.quantize_input for layer in parts if isinstance(layer, Fp8Linear)}) > 1:
            return "an input that only some quantise"
    return ""


def in_shared_memory(tensor: Tensor) -> bool:
    """Return whether other processes may read a tensor on a CPU where it is, so that it must stay there."""
    return tensor.device.type == "cpu" and tensor.is_shared()


def as_rows(parameters: Sequence[nn.Parameter], *known: Tensor | None) -> Tensor:
    """Return a matrix with `parameters` as its rows: one of `known`, or else a new one that they move to."""
    for matrix in known:
        if matrix is not None and are_rows(parameters, matrix):
            return matrix
    first = parameters[0]
    shape = (sum(p.shape[0] for p in parameters), first.shape[1])
    end = first.storage_offset() + shape[0] * shape[1]
    if end * first.element_size() <= first.untyped_storage().nbytes():
        matrix = first.data.as_strided(shape, (shape[1], 1))
        if are_rows(parameters, matrix):
            for parameter in parameters:
                parameter.data = with_storage(parameter.data)
            return matrix
    matrix = torch.empty(shape, dtype=first.dtype, device=first.device)
    row = 0
    for parameter in parameters:
        rows = matrix[row : row + parameter.shape[0]]
        rows.copy_(parameter.data)
        parameter.data = with_storage(rows)
        row += parameter.shape[0]
    _wait_for(matrix)
    return matrix


def with_storage(rows: Tensor) -> Tensor:
    """Return `rows`, contiguous, with a storage that spans them alone and keeps the memory that they lie in.

    A fake tensor, or one on a device without DLPack, is returned as it is.
    """
    if type(rows) is not Tensor or rows.device.type not in ("cpu", "cuda"):
        return rows
    # As bytes: DLPack has no name for some dtypes of 8 bits in torch 2.11. A capsule: exporting a tensor raises where
    # its GPU is not the current one.
    capsule = dlpack.to_dlpack(rows.view(torch.uint8))  # type: ignore[attr-defined]
    return dlpack.from_dlpack(capsule).view(rows.dtype)


def release_rows(parameters: Iterable[nn.Parameter]) -> None:
    """Move parameters out of the matrix that they lie in, to memory that is theirs alone."""
    with torch.inference_mode(False), torch.no_grad():
        for parameter in parameters:
            parameter.data = parameter.data.clone()


def _wait_for(matrix: Tensor) -> None:
    """Wait until the copies into a new matrix have ended, once after a load.

    The next kernel may be a GEMM that loads its weights before the previous kernel ends (PDL): it relies on no kernel
    of the same step writing weights.
    """
    if matrix.is_cuda and torch.cuda.is_initialized():  # a fake matrix may be on a device that does not exist
        torch.cuda.current_stream(matrix.device).synchronize()


def are_rows(parameters: Sequence[nn.Parameter], matrix: Tensor) -> bool:
    """Return whether `parameters` are the rows of `matrix`, in their order."""
    row_bytes, address = matrix.shape[1] * matrix.element_size(), matrix.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != address or not parameter.is_contiguous() or parameter.device != matrix.device:
            return False
        address += parameter.shape[0] * row_bytes
    return address == matrix.data_ptr() + matrix.shape[0] * row_bytes and parameters[0].dtype is matrix.dtype
