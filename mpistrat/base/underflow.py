"""Arithmetic in which underflow is not an error, whatever `np.seterr` is: small numbers become 0, as in the compiled loops."""

from __future__ import annotations

import numpy as np

__all__ = ["may_underflow"]

# A decorator for this package's functions only: in a user's function the user's np.seterr applies.
may_underflow = np.errstate(under="ignore")
