"""The ranks that a model is split over, seen from one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import check
from ..layout import cdiv

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process group by its name, which compiled graphs and pickles can hold.

    Attributes:
        rank: place of this process in the group.
        size: number of ranks.
        name: torch's name of the group.
        symmetric: whether all-reduces go through symmetric memory, see `symmetric`.
    """

    rank: int
    size: int
    name: str
    symmetric: bool = False

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ranks:
        """Return the ranks of a mesh with one dim. Raises E701 for any other mesh."""
        check(torch.distributed.is_available(), "E101", got="a torch without torch.distributed")
        from torch.distributed.device_mesh import DeviceMesh

        check(
            isinstance(mesh, DeviceMesh),
            "E701",
            got=f"mesh of type {type(mesh).__name__}",
            fix='pass torch.distributed.device_mesh.init_device_mesh("cuda", (world_size,))',
        )
        check(
            mesh.ndim == 1,
            "E701",
            got=f"a mesh of shape {tuple(mesh.shape)}",
            why="a layer is split along one dim",
            fix='pass one dim of it, as mesh["tp"]',
        )
        coordinate = mesh.get_coordinate()
        check(coordinate is not None, "E701", got="a mesh without this process", fix="call this on ranks of the mesh")
        assert coordinate is not None
        return cls(coordinate[0], mesh.size(), str(mesh.get_group().group_name))

    @property
    def group(self) -> Any:
        """Process group of this name."""
        from .._compat import resolve_group

        return resolve_group(self.name)

    def part(self, total: int) -> tuple[int, int]:
        """Return begin and end of this rank's part of `total` units; the last ranks may have fewer than the others."""
        size = cdiv(total, self.size)
        return min(self.rank * size, total), min((self.rank + 1) * size, total)
