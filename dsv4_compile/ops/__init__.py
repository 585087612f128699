"""Schemas, fakes and checks of `torch.ops.dsv4`. Importing this package registers every op; it needs torch alone.

Every file `<family>/<op>.py` is imported: there is no list of ops.
"""

from __future__ import annotations

import importlib as _importlib
import pkgutil as _pkgutil

for _family in sorted(_pkgutil.iter_modules(__path__)):
    _package = _importlib.import_module(f"{__name__}.{_family.name}")
    for _op in sorted(_pkgutil.iter_modules(_package.__path__)):
        _importlib.import_module(f"{_package.__name__}.{_op.name}")
