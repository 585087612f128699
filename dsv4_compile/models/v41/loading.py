"""Loading of an official DeepSeek-V4.1 folder: text model alone, weights as they are stored or dequantised."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...checkpoints.header import DTYPES
from ...checkpoints.paths import open_inside, read_exactly
from ...checkpoints.reader import Index, Reader
from ...errors import DSV4Error, check, error, needs
from ...hf.loading.checkpoint import Checkpoint, Problems, read_checkpoint, without_drafts
from ...hf.loading.fill import fill
from ...hf.loading.placement import Piece, Placement
from ...hf.loading.split_load import rank_pieces
from ...layout import MX_TILE
from ...loading import check_scales
from ...parallel import Ranks, gather_objects, watchdog
from ...reference.common.block_scale import dequantize_weight
from ...reference.common.quant import dequantize_mxfp4, dequantize_tiles
from ...sizes import free_memory
from .cache import V41Caches
from .config import V41Config
from .model import V41Model
from .ngrams import compressed_ids
from .placement import Found, V41Placement, place
from .splitting import keep_part, on_all_ranks, ready_ranks, split_of, watch
from .tables import device_bytes, empty_like, lock_tables, on_host
from .tensors import E2M1, E4M3

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("dsv4_compile.models")
_MOST = 0.95
"""Share of a device's free memory that weights and caches may take with draft layers that nobody asked for."""
_MOST_TOKENIZER = 64 << 20
"""Bytes of the longest tokenizer.json."""
TOKENIZER = "tokenizer.json"


@on_all_ranks
def load(
    path: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    dequantize: bool = False,
    quantize_input: bool = True,
    token_map: Tensor | None = None,
    drafts: str = "auto",
    engram: str = "auto",
    mesh: DeviceMesh | None = None,
    expert_layout: str = "experts",
    collectives: str = "functional",
    rank_timeout: float = watchdog.TIMEOUT,
    caches: Mapping[str, Any] | None = None,
) -> V41Model:
    """Load a folder as DeepSeek publishes V4.1, and return its text model.

    The vision tower is not built; it is left out, and the log says so.

    Args:
        path: folder with `config.json`, safetensors files and `tokenizer.json`.
        device: where the model goes (None = the GPU if there is one, else the CPU).
        dtype: of activations and floating weights: bfloat16, float16 or float32.
        dequantize: make e4m3 and MXFP4 weights floating. Without it they stay as they are stored.
        quantize_input: round inputs of quantised weights to mxfp8, as DeepSeek's own kernels do.
        token_map: int32 `[vocab_size]`, compressed ids of tokens (None = from the folder's tokenizer).
        drafts: draft layers (`mtp.*`), which become `model.mtp`. "on" loads them and raises E209 for a folder without;
            "off" leaves them out; "auto" loads those of a folder if they fit next to the model, its `caches` and a
            twentieth of the free memory, on all ranks. A warning says that they are left out.
        engram: where its tables go: "device", "host" for locked memory that a GPU reads rows of, or "auto", the device
            if that leaves a tenth of its free memory.
        mesh, expert_layout, collectives, rank_timeout: see `split`. A rank reads its part of the weights alone.
        caches: arguments of `new_caches` that the model will have, which need memory next to the weights.

    Raises, before anything is allocated: E209 for a folder that is incomplete or damaged, E205 for other models, E207
    for tensors that do not fit the configuration, E210 if weights and `caches` do not fit into the device's memory,
    E204 for their sizes, and with a mesh E701, E702 and E302 as `split` does.
    """
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    floats = (torch.bfloat16, torch.float16, torch.float32)
    check(dtype in floats, "E201", got=f"{dtype=}", rule=f"dtype is one of {', '.join(map(str, floats))}")
    modes = ("auto", "on", "off")
    check(drafts in modes, "E201", got=f"drafts={drafts!r}", rule=f"drafts is one of {', '.join(modes)}")
    checkpoint = read_checkpoint(path)
    if drafts == "on" and not checkpoint.drafts:
        raise without_drafts(checkpoint)
    kinds = {"dtype": dtype, "quantised": not dequantize, "quantize_input": quantize_input and not dequantize}
    ranks = None if mesh is None else ready_ranks(mesh, collectives, target)
    plan, reason = _plan(checkpoint, drafts != "off", kinds, ranks, expert_layout, caches or {}), ""
    if drafts == "auto" and plan.placement.drafts is not None and not _fits(plan, engram, target, ranks):
        plan = _plan(checkpoint, False, kinds, ranks, expert_layout, caches or {})
        reason = '; they do not fit next to the model, and drafts="on" raises an error that says how much is missing'
    placement, model, pieces = plan.placement, plan.model, plan.pieces
    config = placement.config
    table = folder_token_map(checkpoint.folder, config) if token_map is None else token_map
    good = table.dtype is torch.int32 and tuple(table.shape) == (config.vocab_size,)
    check(good, "E201", got=f"token_map {table.dtype} {list(table.shape)}", rule=f"int32 [{config.vocab_size}]")
    host = on_host(model, engram, target, plan.caches)
    _log_left_out(placement, reason)
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                empty = empty_like(f"{prefix}.{name}", parameter, target, host)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
    _fill(model, pieces, placement, checkpoint, target)
    if host:
        lock_tables(model, target)
    model.token_map.copy_(table)
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = buffer.to(target)
    if mesh is not None:
        facts = {"expert_layout": expert_layout, "dtype": dtype, "dequantize": dequantize}
        watch(model, {**facts, "quantize_input": quantize_input}, rank_timeout)
    return model


class _Plan(NamedTuple):
    """A model on the meta device and the pieces that fill it; the bytes of its caches."""

    placement: V41Placement
    model: V41Model
    pieces: Iterable[Piece]
    caches: int


def _plan(
    checkpoint: Checkpoint,
    drafts: bool,
    kinds: Mapping[str, Any],
    ranks: Ranks | None,
    expert_layout: str,
    caches: Mapping[str, Any],
) -> _Plan:
    """Return what is loaded of a folder, this rank's part of it with `ranks`.

    Args:
        kinds: of weights, as `V41Model` takes them; caches: arguments of `V41Caches`, none for no caches.
    """
    placement = _placed(checkpoint, drafts)
    with torch.device("meta"):
        model = V41Model(placement.config, drafts=placement.drafts, **kinds)
    needed = V41Caches(placement.config, drafts=placement.drafts, device="meta", **caches).nbytes if caches else 0
    parameters = dict(model.named_parameters())
    tensors = (*placement.matched, *placement.draft_tensors)
    pieces: Iterable[Piece] = (piece for tensor in tensors for piece in _pieces(tensor, parameters))
    if ranks is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        pieces = list(rank_pieces(pieces, shapes, lambda name: split_of(name, expert_layout), ranks))
        keep_part(model, ranks, expert_layout, quantised=kinds["quantised"])
    return _Plan(placement, model, pieces, needed)


def _fits(plan: _Plan, engram: str, device: torch.device, ranks: Ranks | None) -> bool:
    """Return whether weights and caches leave a twentieth of the free memory, on all ranks.

    Tables of the engram do not count where they may go to host memory.
    """
    needed, free = plan.caches + device_bytes(plan.model, engram, device), free_memory(device)
    fits = free is None or needed <= _MOST * free
    return fits if ranks is None else all(gather_objects(fits, ranks))


def _placed(checkpoint: Checkpoint, drafts: bool) -> V41Placement:
    """Return the places of a folder's tensors, or raise its first problem, with the number of others."""
    try:
        placement = place(checkpoint, drafts=drafts)
    except DSV4Error as fault:
        if fault.code == "E207":  # missing layers: files that are missing explain it
            _raise_first(checkpoint, checkpoint.problems)
        raise
    _raise_first(checkpoint, checkpoint.problems, placement.problems)
    return placement


def _raise_first(checkpoint: Checkpoint, *groups: Problems) -> None:
    problems = [problem for group in groups for problem in group.kept]
    if not problems:
        return
    first, count = problems[0], sum(group.count for group in groups)
    if count > 1:
        more = f"{first.why or 'the headers say so'}; {count - 1} more: dsv4 doctor {checkpoint.folder}"
        first = error(first.code, got=first.got, why=more, fix=first.fix)
    raise first


def _log_left_out(placement: V41Placement, reason: str) -> None:
    """Log what is not loaded, and the reason for draft layers, if there is one."""
    for what, left_out, why in (("vision tower", placement.vision, ""), ("draft layers", placement.left_out, reason)):
        if left_out:
            size = sum(stored.nbytes for stored in left_out) / 1e9
            _log.warning("%s not built: %d tensors, %.2f GB, are not loaded%s", what, len(left_out), size, why)


def folder_token_map(folder: Path, config: V41Config) -> Tensor:
    """Return int32 `[vocab_size]` from the folder's tokenizer, E209 if it has none that can be read."""
    with needs("hf", "the engram of DeepSeek-V4.1"):
        from tokenizers import Tokenizer
    file, fix = folder / TOKENIZER, "download tokenizer.json, or pass token_map"
    try:
        descriptor = open_inside(folder, file)
        with open(descriptor, "rb", buffering=0) as opened:
            text = read_exactly(opened.fileno(), _MOST_TOKENIZER)
        tokenizer = Tokenizer.from_buffer(text)
    except DSV4Error:
        raise
    except OSError as fault:
        raise error("E209", got=f"{file} cannot be read", why=str(fault), fix=fix) from None
    except Exception as fault:  # the library raises Exception itself
        raise error("E209", got=f"{file} is not a tokenizer", why=str(fault), fix=fix) from None
    return compressed_ids(
        config,
        lambda token: str(tokenizer.decode([token], skip_special_tokens=False)),
        lambda token: str(tokenizer.id_to_token(token)),
    )


def _pieces(tensor: Found, parameters: Mapping[str, Tensor]) -> Iterator[Piece]:
    """Yield the pieces of a tensor in a whole model: weight and scales, or a weight that is dequantised with them."""
    expected, scale = tensor.expected, tensor.scale
    expert: Index = () if expected.expert is None else (expected.expert,)
    into = expert if expected.rows is None else (*expert, slice(*expected.rows))
    if scale is None or expected.parameter_scale not in parameters:
        yield Piece(tensor.weight, expected.parameter, into, scale=scale)
        return
    yield Piece(tensor.weight, expected.parameter, into)
    if expected.rows is not None and expected.storage == E4M3:
        into = (*expert, slice(*(row // MX_TILE for row in expected.rows)))
    yield Piece(scale, expected.parameter_scale, into)


def _fill(
    model: V41Model, pieces: Iterable[Piece], placement: V41Placement, checkpoint: Checkpoint, device: torch.device
) -> None:
    """Read pieces into their places: in threads where no value changes, else one after the other."""
    parameters = dict(model.named_parameters())
    direct: list[Piece] = []
    changed: list[Piece] = []
    for piece in pieces:
        (direct if piece.scale is None else changed).append(piece)
    for where in dict.fromkeys(parameters[piece.target].device for piece in direct):
        here = [piece for piece in direct if parameters[piece.target].device == where]
        fill(Placement(model, pieces=here), checkpoint.sources, where)
    for name, parameter in parameters.items():
        if parameter.dtype is torch.float8_e8m0fnu:
            check_scales(parameter.view(torch.uint8), name)
    tensors = (*placement.matched, *placement.draft_tensors)
    storages = {tensor.weight.name: tensor.expected.storage for tensor in tensors}
    files = {stored.file for piece in changed for stored in (piece.stored, piece.scale) if stored is not None}
    with ExitStack() as opened:
        readers = {file: opened.enter_context(Reader(checkpoint.sources[file])) for file in sorted(files)}
        for piece in changed:
            _fill_dequantised(parameters[piece.target], piece, storages[piece.stored.name], readers, device)


def _fill_dequantised(
    parameter: Tensor, piece: Piece, storage: str, readers: dict[Path, Reader], device: torch.device
) -> None:
    scale = piece.scale
    assert scale is not None
    values = readers[piece.stored.file].read(piece.stored).to(device)
    bytes_ = readers[scale.file].read(scale).to(device)
    check_scales(bytes_, str(scale))
    parameter.detach()[piece.into].copy_(dequantized(values, bytes_, storage)[piece.kept])


def dequantized(values: Tensor, scale: Tensor, storage: str) -> Tensor:
    """Return float32 `[N, K]` of a stored weight."""
    byte = scale.view(torch.uint8)
    if storage == E2M1:
        return dequantize_mxfp4(values.view(torch.uint8), byte)
    e4m3 = values.view(DTYPES["F8_E4M3"])
    return dequantize_weight(e4m3, byte, MX_TILE) if storage == E4M3 else dequantize_tiles(e4m3, byte, MX_TILE)
