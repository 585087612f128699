"""Run DeepSeek-V4 attention through torch.compile.

Importing this package registers `torch.ops.dsv4` and nothing else: no Triton, no GPU, no torch setting is touched.
"""

from __future__ import annotations

import pathlib as _pathlib

_root = _pathlib.Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kernels").is_dir():
    # In a source checkout the sibling folders kernels/ and lowering/ are our subpackages.
    __path__.append(str(_root))
