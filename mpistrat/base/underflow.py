"""Arithmetic in which underflow is no error, whatever `np.seterr` says: small numbers become 0, as in the compiled loops."""

from __future__ import annotations

import numpy as np

__all__ = ["may_underflow"]

# A decorator of functions of this package only: in a user's function the user's np.seterr holds.
may_underflow = np.errstate(under="ignore")
