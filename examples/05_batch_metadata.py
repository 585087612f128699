"""Draw the metadata of a mixed batch: the keys that every token of a step attends, and the slots it is written to.

One op, `torch.ops.dsv4.batch_metadata`, turns the ends and lengths of requests and their block tables into everything
that attention needs, for decodes, drafts to verify, a chunk of a prompt and a whole prompt alike. Its results are in
buffers that never move, padding included, so that a CUDA graph can hold the whole step. Each mark in the picture is
read back from these buffers, through the block tables.

Writes batch_metadata.png, or FILE. Runs on a CPU in a few seconds and needs matplotlib:
python examples/05_batch_metadata.py [FILE]
"""

from __future__ import annotations

import sys

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle

from dsv4_compile import layout
from dsv4_compile.metadata import AttentionMetadata, BlockTables, MetadataBuffers

MAX_LEN, WINDOW, TOPK, BUCKET = 384, 48, 12, 48

# New tokens, length, label and colour of each request. Decodes come first.
REQUESTS = [
    (1, 301, "a decode", "#d1495b"),
    (3, 193, "a decode with\ntwo drafts", "#e8871e"),
    (24, 134, "a chunk of\na prompt", "#1f7a8c"),
    (16, 16, "a new prompt", "#6a4c93"),
]
WINDOW_COLOUR, ENTRY_COLOUR, PAST, UNSEEN = "#2d6cdf", "#f2a104", "#e4e6eb", "#ffffff"
NOT_CHOSEN = "#fbe3b3"


def random_tables(buffers: MetadataBuffers) -> BlockTables:
    """Return block tables with pages in random order, as in an engine that has run for a while."""

    def table(group: str) -> torch.Tensor:
        columns = buffers.plan.sizes[f"{group}_blocks"]
        return torch.randperm(len(REQUESTS) * columns).view(len(REQUESTS), columns).int()

    return BlockTables.of({group: table(group) for group in buffers.groups})


def owners(table: torch.Tensor, block_size: int) -> dict[int, int]:
    """Return the index within its request of every slot of a cache: the inverse of the block table."""
    return {
        int(page) * block_size + offset: column * block_size + offset
        for row in table[: len(REQUESTS)].tolist()
        for column, page in enumerate(row)
        for offset in range(block_size)
    }


def choose_entries(metadata: AttentionMetadata) -> torch.Tensor:
    """Return int32 `[T, K]`: the entries that an indexer with random queries and keys selects for each token."""
    source, heads, dim = metadata.sources[4], 4, 32
    pages = len(REQUESTS) * source.indexer_block_table.shape[1]
    drift = torch.randn(heads, dim)  # similar queries, so that neighbouring tokens choose similar entries
    q = drift + 0.5 * torch.randn(BUCKET, heads, dim)
    keys = torch.randn(pages, layout.storage_block_size(4), dim)
    empty, weights = torch.zeros(BUCKET, heads, 0), torch.ones(BUCKET, heads)
    return torch.ops.dsv4.indexer_logits_topk(
        q, empty, weights, keys, source.indexer_block_table, metadata.token_to_req, source.context_lens, keys.shape[1],
        "plain", TOPK,
    )  # fmt: skip


def base(metadata: AttentionMetadata) -> np.ndarray:
    """Return an image `[T, MAX_LEN]` with each token's past in grey."""
    image = np.ones((BUCKET, MAX_LEN, 3))
    for row, (position, valid) in enumerate(zip(metadata.positions, metadata.is_valid_token, strict=True)):
        if valid:
            image[row, : position + 1] = to_rgb(PAST)
    return image


def paint(image: np.ndarray, row: int, logical: list[int], tokens: int, colour: str) -> None:
    """Colour entries of `tokens` tokens each."""
    for index in logical:
        image[row, index * tokens : (index + 1) * tokens] = to_rgb(colour)


def window_positions(metadata: AttentionMetadata, tables: BlockTables) -> list[list[int]]:
    """Return the positions in each token's window, from the slots in its row."""
    position_of = owners(tables.window, layout.WINDOW_BLOCK)
    rows = zip(metadata.window.indices.tolist(), metadata.window.lens.tolist(), strict=True)
    return [[position_of[slot] for slot in slots[:count]] for slots, count in rows]


def draw_rows(axes: Axes, image: np.ndarray, title: str, note: str) -> None:
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, MAX_LEN, BUCKET, 0))
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=22)
    axes.text(0, 1.012, note, transform=axes.transAxes, fontsize=9, color="#555555", va="bottom")
    axes.set_xlabel("position in the request's own sequence", fontsize=9)
    axes.set_xticks(range(0, MAX_LEN + 1, layout.HCA_RATIO))
    axes.tick_params(labelsize=8, length=3, color="#aaaaaa")
    first = 0
    for tokens, *_ in REQUESTS:
        first += tokens
        axes.axhline(first, color="white", linewidth=2.5)
    axes.add_patch(
        Rectangle((0, first), MAX_LEN, BUCKET - first, hatch="////", fill=False, edgecolor="#c9ccd3", linewidth=0)
    )
    for side in axes.spines.values():
        side.set_visible(False)


def mark_completed(axes: Axes, slots: torch.Tensor, positions: torch.Tensor) -> None:
    """Draw a triangle at each token that completes a group and so writes an entry."""
    rows = [row for row, slot in enumerate(slots.tolist()) if slot >= 0]
    axes.plot(positions[rows] + 6, [row + 0.5 for row in rows], "<", markersize=3.5, color="#222222", clip_on=False)


def draw_labels(axes: Axes) -> None:
    """Draw the names of the requests next to their rows."""
    axes.set_yticks([])
    first = 0
    for tokens, length, what, colour in [*REQUESTS, (BUCKET - sum(r[0] for r in REQUESTS), 0, "padding", "#9aa0ab")]:
        axes.add_patch(Rectangle((-14, first + 0.15), 8, tokens - 0.3, color=colour, clip_on=False, linewidth=0))
        what = what if not length else f"{what}\n{tokens} of {length} tokens"
        # A single row is less high than its name.
        y = {0: -0.9, 1: 2.6}.get(first, first + tokens / 2)
        axes.text(-22, y, what, ha="right", va="center", fontsize=9, color=colour)
        first += tokens


def draw_pages(axes: Axes, metadata: AttentionMetadata, tables: BlockTables) -> None:
    """Draw the window's cache by page: the requests of its tokens, and the tokens that this step writes."""
    block, pages = layout.WINDOW_BLOCK, tables.window.shape[1] * len(REQUESTS)
    image = np.ones((pages, block, 3)) * np.array(to_rgb("#f4f5f7"))
    for request, (_, length, _, colour) in enumerate(REQUESTS):
        for position in range(length):
            page = int(tables.window[request, position // block])
            image[page, position % block] = 0.68 + 0.32 * np.array(to_rgb(colour))
    for slot, request in zip(metadata.window.slot_mapping.tolist(), metadata.token_to_req.tolist(), strict=True):
        if slot >= 0:
            image[slot // block, slot % block] = to_rgb(REQUESTS[request][3])
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, block, pages, 0))
    axes.set_yticks(np.arange(pages) + 0.5, range(pages), fontsize=7)
    axes.hlines(range(1, pages), 0, block, color="white", linewidth=1.5)
    axes.set_xticks([0, 16, 32, 48, 64])
    axes.tick_params(labelsize=8, length=0)
    axes.set_xlabel("slot in the page", fontsize=9)
    axes.set_ylabel("page", fontsize=9)
    axes.set_title("the window's cache", loc="left", fontsize=12, fontweight="bold", pad=22)
    axes.text(0, 1.012, "strong: written by this step", transform=axes.transAxes, fontsize=9, color="#555555")
    for side in axes.spines.values():
        side.set_visible(False)


def draw(metadata: AttentionMetadata, tables: BlockTables, path: str, description: str) -> None:
    """Write the picture, with `description` as its text for readers that do not see it."""
    window, swa = window_positions(metadata, tables), base(metadata)
    for row, positions in enumerate(window):
        paint(swa, row, positions, 1, WINDOW_COLOUR)

    csa, hca = swa.copy(), swa.copy()
    chosen, lens = torch.ops.dsv4.global_topk(
        choose_entries(metadata), metadata.token_to_req, metadata.sources[4].block_table, metadata.is_valid_token,
        layout.storage_block_size(4),
    )  # fmt: skip
    entry_of = owners(tables.sources[4].entries, layout.storage_block_size(4))
    group_of = owners(tables.sources[128].entries, layout.storage_block_size(128))
    for row in range(BUCKET):
        paint(csa, row, list(range(int(metadata.sources[4].context_lens[row]))), 4, NOT_CHOSEN)
        paint(csa, row, [entry_of[slot] for slot in chosen[row, : lens[row]].tolist()], 4, ENTRY_COLOUR)
        slots = metadata.sources[128].indices[row, : metadata.sources[128].lens[row]].tolist()
        paint(hca, row, [group_of[slot] for slot in slots], 128, ENTRY_COLOUR)
        for image in (csa, hca):
            paint(image, row, window[row], 1, WINDOW_COLOUR)

    figure, axes = plt.subplots(1, 4, figsize=(18, 8), width_ratios=(1, 1, 1, 0.55), dpi=80)
    figure.subplots_adjust(left=0.1, right=0.985, top=0.8, bottom=0.14, wspace=0.1)
    draw_rows(axes[0], swa, "window", f"every layer: the last {WINDOW} tokens")
    draw_rows(axes[1], csa, "ratio 4", f"and the {TOPK} entries of 4 tokens that the indexer chose")
    draw_rows(axes[2], hca, "ratio 128", "and every entry of 128 tokens")
    mark_completed(axes[1], metadata.sources[4].slot_mapping, metadata.positions)
    mark_completed(axes[2], metadata.sources[128].slot_mapping, metadata.positions)
    draw_labels(axes[0])
    for other in axes[1:3]:
        other.set_yticks([])
    draw_pages(axes[3], metadata, tables)
    key = {"window": WINDOW_COLOUR, "compressed entry": ENTRY_COLOUR, "seen, not chosen": NOT_CHOSEN, "past": PAST}
    marks = [Patch(color=colour, label=name) for name, colour in key.items()]
    marks.append(
        plt.Line2D([], [], marker="<", linestyle="", color="#222222", label="completes an entry, and writes it")
    )
    figure.legend(handles=marks, loc="lower center", ncols=5, frameon=False, fontsize=10)
    tokens = sum(request[0] for request in REQUESTS)
    figure.text(0.02, 0.945, "What each token of a mixed batch attends", fontsize=18, fontweight="bold")
    said = f"{tokens} tokens of {len(REQUESTS)} requests and {BUCKET - tokens} rows of padding, one row each. "
    said += "An entry is visible from the token that completes its group; the window is drawn on top."
    figure.text(0.02, 0.9, said, fontsize=11, color="#555555")
    figure.savefig(path, metadata={"Description": description})


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(3)
    buffers = MetadataBuffers(
        max_num_batched_tokens=BUCKET, max_num_seqs=len(REQUESTS), max_model_len=MAX_LEN, window=WINDOW
    )
    print(buffers.plan, end="\n\n")
    starts = torch.tensor([0, *(request[0] for request in REQUESTS)]).cumsum(0)
    buffers.load(starts, [request[1] for request in REQUESTS], block_tables=random_tables(buffers))
    buffers.refresh(BUCKET)
    metadata = buffers.metadata(BUCKET)

    lines = ["row  request  position  window slot  window  entries of 4  entries of 128"]
    for row in (0, 1, 2, 3, 4, 27, 28, 43, 44):
        what = (metadata.token_to_req, metadata.positions, metadata.window.slot_mapping, metadata.window.lens)
        values = [int(x[row]) for x in (*what, metadata.sources[4].context_lens, metadata.sources[128].lens)]
        note = "" if metadata.is_valid_token[row] else "   padding"
        lines.append("{:3}{:9}{:10}{:13}{:8}{:14}{:16}".format(row, *values) + note)
    print("\n".join(lines))

    path = sys.argv[1] if len(sys.argv) > 1 else "batch_metadata.png"
    draw(metadata, buffers.block_tables, path, "\n".join(lines))
    print(f"\n{path}")


if __name__ == "__main__":
    main()
