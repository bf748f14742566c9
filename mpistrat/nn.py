"""`ms.nn`: scaled losses."""

from .strategy.loss import compute_average_loss, scale_regularization_loss

__all__ = ["compute_average_loss", "scale_regularization_loss"]
