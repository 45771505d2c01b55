"""`raydist sweep`: many trials of one job, on workers that stay warm.

This package has the name of the function `raydist.sweep`, so it can be called as that: importing a module of it puts the
package in the function's place.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **settings: Any) -> Any:
        from raydist.api import sweep

        return sweep(*args, **settings)


sys.modules[__name__].__class__ = _Callable
