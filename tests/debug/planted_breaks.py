"""Functions that break a graph, each for a different reason.

A comment "BREAK: words" marks the line of a break, and the words that its cause must contain; "EAGER: words" marks a
break that makes the whole function run eagerly. The words are missing where the cause differs between torch releases.
"""

# ruff: noqa: RET504, PLW2101
# The patterns that the linter would simplify are those to test.

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import json
import logging
import math
import os
import queue
import random
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from safetensors import serialize

log = logging.getLogger("planted")


def branch_on_a_value(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.sum() > 0:  # BREAK: depends on the value of a tensor
        y = y + 1
    return y


def conditional_expression_on_a_value(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + 1 if y.max() > 0 else y  # BREAK: depends on the value of a tensor


def short_circuit_on_a_value(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    wanted = y.any() or y.all()  # BREAK: depends on the value of a tensor
    return y + wanted


def loop_until_a_value(x: torch.Tensor) -> torch.Tensor:
    while x.sum() < 100:  # BREAK: depends on the value of a tensor
        x = x + 10
    return x


def item(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y * y.sum().item()  # BREAK: reads a value out of a tensor


def conversion_to_int(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y * int(y.sum())  # BREAK: reads a value out of a tensor


def conversion_to_float(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y * math.floor(float(y.sum()))  # BREAK: reads a value out of a tensor


def tolist(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    first = y.tolist()[0]  # BREAK: reads a value out of a tensor
    return y + len(first)


def tensor_as_list_index(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + [1, 2, 3][y.argmax() % 3]  # BREAK: reads a value out of a tensor


def tensor_as_slice_bound(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    n = (y > 0).sum()
    return y[:n]  # EAGER: reads a value out of a tensor


def nonzero(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.nonzero() + 1  # BREAK: depends on values


def boolean_mask(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y[y > 0] + 1  # BREAK: depends on values


def masked_select(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return torch.masked_select(y, y > 0) + 1  # BREAK: depends on values


def unique(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return torch.unique(y) + 1  # BREAK: depends on values


def repeat_interleave(x: torch.Tensor) -> torch.Tensor:
    counts = x[0].abs().long()
    return torch.repeat_interleave(x, counts, dim=0)  # BREAK: depends on values


def printing(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    print("shape", y.shape)  # BREAK: print() needs Python
    return y + 1


def printing_first(x: torch.Tensor) -> torch.Tensor:
    print("begin")  # BREAK: print() needs Python
    return x + 1


def logging_call(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    log.info("y is %s", y.shape)  # BREAK: logging call
    return y + 1


def warning(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    warnings.warn("slow path", stacklevel=2)  # BREAK: warnings.warn
    return y + 1


def opening_a_file(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    open(os.devnull).close()  # BREAK: open() needs Python
    return y + 1


def clock(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + time.perf_counter_ns() * 0  # BREAK


def thread_identity(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + threading.get_ident() * 0  # BREAK: C code


def c_extension_checksum(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + zlib.crc32(b"page") * 0  # BREAK: C code


def process_identity(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + os.getpid() * 0  # BREAK: C code


def garbage_collection(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    gc.collect()  # BREAK: C code
    return y + 1


@torch.compiler.disable
def _untraced(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def disabled_helper(x: torch.Tensor) -> torch.Tensor:
    y = _untraced(x * 2)  # BREAK: marked torch.compiler.disable
    return y + 1


def explicit_break(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._dynamo.graph_break()  # BREAK: asks for a graph break
    return y + 1


def _helper(x: torch.Tensor) -> torch.Tensor:
    y = x + 3
    print("helper")  # BREAK: print() needs Python
    return y


def inside_a_helper(x: torch.Tensor) -> torch.Tensor:
    return _helper(x * 2) + 1


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        if y.isnan().any():  # BREAK: depends on the value of a tensor
            y = torch.zeros_like(y)
        return y


_LAYER = _Layer()


def inside_a_module(x: torch.Tensor) -> torch.Tensor:
    return _LAYER(x) + 1


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for step in range(3):
        x = x + step
        print("step", step)  # EAGER: print() needs Python
    return x


@contextlib.contextmanager
def _announced() -> Iterator[None]:
    print("enter")  # EAGER: print() needs Python
    yield


def inside_a_context_manager(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with _announced():
        y = y + 1
    return y


def file_as_context_manager(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with open(os.devnull) as stream:  # EAGER: `with` block
        y = y + len(stream.read())
    return y


def lock_as_context_manager(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with threading.Lock():  # EAGER: `with` block
        y = y + 1
    return y


def backward(x: torch.Tensor) -> torch.Tensor:
    (x * _LAYER.scale).sum().backward()  # BREAK: gradients
    return x + 1


def sparse_tensor(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.to_sparse().to_dense() + 1  # EAGER: sparse


def recurrent_layer(x: torch.Tensor) -> torch.Tensor:
    return _GRU(x)[0] + 1  # BREAK


_GRU = torch.nn.GRU(4, 4)


def new_parameter(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + torch.nn.Parameter(y)  # BREAK: a parameter is created


def deep_copy(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return copy.deepcopy(y) + 1  # BREAK: copy.deepcopy


def standard_library(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + len(json.dumps({"pages": 4}))  # BREAK: standard library


def saving(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.save(y, os.devnull)  # BREAK: not to trace save
    return y + 1


def system_random(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + random.SystemRandom().random() * 0  # BREAK


def tensor_in_text(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + len(f"{y}")  # BREAK


def shared_memory(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.share_memory_() + 1  # BREAK


def class_inside(x: torch.Tensor) -> torch.Tensor:
    class Pair:  # BREAK: a class is defined
        first = 1

    return x + Pair.first


def inference_query(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + int(y.is_inference())  # BREAK: is_inference


def numpy_generator(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + float(np.random.default_rng(0).random())  # BREAK: numpy


def numpy_bytes(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + len(y.numpy().tobytes())  # BREAK: numpy


def executed_text(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    exec("pass")  # BREAK: exec() needs Python
    return y + 1


def object_size(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + sys.getsizeof([])  # BREAK: C code


def written_output(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    sys.stdout.write("step\n")  # BREAK
    return y + 1


def storage_address(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + y.untyped_storage().data_ptr() * 0  # BREAK


def foreign_function(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + ctypes.sizeof(ctypes.c_int)  # BREAK: C code


def native_extension(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + len(serialize({}))  # BREAK: C code


_QUEUE: queue.Queue[torch.Tensor] = queue.Queue()


def queueing(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    _QUEUE.put(y)  # BREAK
    return y + 1


def thread_setting(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.set_num_threads(torch.get_num_threads())  # BREAK
    return y + 1


def seeding(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.manual_seed(0)  # BREAK: not to trace manual_seed
    return y + 1


def tensor_as_str(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + len(str(y))  # BREAK


def sorting_tensors(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + sorted([y.sum(), x.sum()])[0]  # BREAK


def range_of_a_value(x: torch.Tensor) -> torch.Tensor:
    for step in range(x.argmax()):  # BREAK
        x = x + step
    return x


def two_breaks(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    print("one")  # BREAK: print() needs Python
    y = y + 1
    n = y.sum().item()  # BREAK: reads a value out of a tensor
    return y * n
